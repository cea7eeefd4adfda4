// How blocks and ranks begin together, and where a producer's bytes go.
//
// Global     BurstControl.started[r]   written by rank r with release.sys, read by all ranks
// protocol   BurstControl.barrier      relaxed adds of this rank's blocks, cleared by the launcher
//            BurstControl.go_ns        block 0 before the first meeting, read by all behind it
#pragma once

#include <cstdint>

#include "burst/plan.h"
#include "common/ptx.cuh"
#include "common/wait.cuh"

namespace xstage {

__device__ __forceinline__ int64_t clock_now() {
  int64_t t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
  return t;
}

// The rank that a producer sends to: the k-th set bit of the mask, cyclically.
__device__ __forceinline__ int destination_of(uint32_t mask, int producer) {
  int const nth = producer % __popc(mask);
  for (int i = 0; i < nth; ++i) mask &= mask - 1;
  return __ffs(mask) - 1;
}

// Start of the area on `dst_rank` where bytes of this rank land.
__device__ __forceinline__ char* landing_area(Workspace const& workspace, int dst_rank) {
  int64_t const area = landing_area_bytes(workspace.region_bytes, workspace.world);
  return workspace.region(dst_rank, kBurstControlBytes + workspace.rank * area);
}

// One rendezvous of all blocks of this launch. Relaxed on purpose: a fence here would wait for the
// bursts that are to be measured. One thread per block calls it.
__device__ __forceinline__ bool meet_relaxed(Workspace const& workspace, uint64_t expected) {
  uint64_t* const barrier = &workspace.region<BurstControl>(workspace.rank)->barrier;
  red_add_relaxed_gpu(barrier, 1);
  WaitSite const site{Phase::kBurstBarrier, -1, 0, expected};
  return wait_until(workspace, site, [&] { return ld_relaxed_gpu(barrier); });
}

// Waits until every rank has begun this call. Block 0 alone; advances this rank's call count.
__device__ __forceinline__ bool join_ranks(Workspace const& workspace) {
  Channel* const own = workspace.channel_of(workspace.rank);
  uint64_t const epoch = own->calls + 1;
  own->calls = epoch;
  for (int r = 0; r < workspace.world; ++r) {
    st_release_sys(&workspace.region<BurstControl>(r)->started[workspace.rank], epoch);
  }
  for (int r = 0; r < workspace.world; ++r) {
    uint64_t const* const started = &workspace.region<BurstControl>(workspace.rank)->started[r];
    WaitSite const site{Phase::kBurstBarrier, r, epoch, epoch};
    if (!wait_until(workspace, site, [&] { return ld_acquire_sys(started); })) return false;
  }
  return true;
}

// The block's place in time, set once all blocks and ranks are there.
struct Origin {
  int64_t clock;     // stamps count from here
  int64_t clock_ns;  // globaltimer at `clock`
  int64_t go_clock;  // the first burst may begin
  int64_t go_ns;     // globaltimer at `go_clock`, the same on all SMs
};

// Joins the ranks, meets all blocks, and finds the common start on this SM's clock. The start lies
// 8 us ahead, so that every block has left the barrier by then. One thread per block.
__device__ __forceinline__ bool begin_together(Workspace const& workspace, bool join,
                                               uint32_t num_blocks, Origin& origin) {
  BurstControl* const control = workspace.region<BurstControl>(workspace.rank);
  if (blockIdx.x == 0) {
    if (join && !join_ranks(workspace)) return false;
    st_relaxed_sys(&control->go_ns, global_timer_ns() + 8000);
    fence_acq_rel_gpu();
  }
  if (!meet_relaxed(workspace, num_blocks)) return false;
  fence_acq_rel_gpu();
  uint64_t const go_ns = ld_relaxed_sys(&control->go_ns);
  // The timer ticks coarsely: pair clock and timer at a tick, and measure the clock's rate to it.
  uint64_t const before = global_timer_ns();
  uint64_t first = before, second;
  while (first == before) first = global_timer_ns();
  int64_t const first_clock = clock_now();
  do {
    second = global_timer_ns();
  } while (second < first + 1500);
  int64_t const second_clock = clock_now();
  int64_t const ahead_ns = static_cast<int64_t>(go_ns) - static_cast<int64_t>(first);
  int64_t const ahead =
      ahead_ns * (second_clock - first_clock) / static_cast<int64_t>(second - first);
  origin = {first_clock, static_cast<int64_t>(first), first_clock + ahead,
            static_cast<int64_t>(go_ns)};
  return true;
}

__device__ __forceinline__ void spin_until(int64_t clock) {
  while (clock_now() < clock) {
  }
}

// This SM's clock at `cycles` after the common start, by a timetable that holds on all SMs. Clocks
// of SMs drift apart, by microseconds in a millisecond where a GPU has just woken up, so the clock
// is paired with the timer anew, 3 us before the turn. One thread.
__device__ __forceinline__ int64_t turn_clock(Origin const& origin, int64_t cycles,
                                              int64_t clock_khz) {
  constexpr int64_t kPairCyclesAhead = 6000;
  int64_t const turn_ns = origin.go_ns + cycles * 1000000 / clock_khz;
  int64_t turn = 0;
  for (int pass = 0; pass < 2; ++pass) {
    uint64_t const before = global_timer_ns();
    uint64_t now = before;
    while (now == before) now = global_timer_ns();
    turn = clock_now() + (turn_ns - static_cast<int64_t>(now)) * clock_khz / 1000000;
    if (pass == 0) spin_until(turn - kPairCyclesAhead);
  }
  return turn;
}

}  // namespace xstage
