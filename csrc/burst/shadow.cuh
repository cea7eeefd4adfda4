// The shadow probe: what a burst does to other memory operations of its own SM.
//
// Computes   nothing. On every SM of the grid one warp issues a single *local* operation `delay`
//            after the burst's turn and waits for it; blocks below `producers` burst, the others
//            only probe and serve as the control.
// Roles      warps 0-7 burst as in burst_kernel; warp 8 (one thread) probes.
// Stamps     int32 cycles since the block's origin: burst begin, burst free, probe begin, probe
// end. Requires   a timetable whose period lets a burst drain (checked in Python); L2-resident
// scratch.
#pragma once

#include "burst/burst.cuh"
#include "common/mbarrier.cuh"

namespace xstage {

constexpr int kShadowThreads = kBurstThreads + 32;
constexpr int kProbeBytes = 16384;

// The burst's own shared memory, and what the probe needs beside it.
struct ShadowShared {
  BurstShared burst;
  alignas(1024) char landing[kProbeBytes];
  alignas(8) uint64_t arrived;  // mbarrier of bulk and tensor loads
  uint32_t word;
  int64_t turn;  // clock at which the burst is due
  int64_t probe_begin[2];
  int64_t probe_end[2];
};

// Loads into shared memory, in the forms that the probes need.

__device__ __forceinline__ void tensor_load_2d(void* shared, CUtensorMap const* map, int x, int y,
                                               uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3}], [%4];" ::"r"(smem_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(smem_address(barrier))
      : "memory");
}

// One probe of this SM: its own lines of the scratch, so that SMs do not disturb each other.
// A value that a load returned is stored to shared memory before the clock is read: the store
// needs the value, and instructions of a warp issue in order.
__device__ __forceinline__ void probe_once(BurstParams const& params, ShadowShared& shared,
                                           int parity) {
  BurstPlan const& plan = params.plan;
  Probe const probe = static_cast<Probe>(plan.probe);
  uint32_t const bytes = static_cast<uint32_t>(plan.probe_bytes);
  char* const scratch = params.scratch + int64_t{blockIdx.x} * kProbeBytes;
  int64_t const begin = clock_now();
  if (probe == Probe::kLoad) {
    // GPU scope passes L1, as a flag or a fresh operand does.
    uint64_t const value = ld_relaxed_gpu(reinterpret_cast<uint64_t const*>(scratch));
    *static_cast<uint32_t volatile*>(&shared.word) = static_cast<uint32_t>(value);
  } else if (probe == Probe::kAtomic) {
    uint32_t old;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(old)
                 : "l"(scratch)
                 : "memory");
    *static_cast<uint32_t volatile*>(&shared.word) = old;
  } else {
    mbarrier_arrive_expect(&shared.arrived, bytes);
    if (probe == Probe::kBulkLoad) {
      bulk_load(shared.landing, scratch, bytes, &shared.arrived);
    } else {
      tensor_load_2d(shared.landing, &params.probe_map, 0,
                     static_cast<int>(blockIdx.x * (kProbeBytes / 128)), &shared.arrived);
    }
    while (!mbarrier_try_wait(&shared.arrived, parity)) {
    }
  }
  int64_t const end = clock_now();
  shared.probe_begin[parity] = begin;
  shared.probe_end[parity] = end;
}

template <Mechanism kMechanism>
__global__ void __launch_bounds__(kShadowThreads)
    shadow_kernel(const __grid_constant__ BurstParams params) {
  extern __shared__ __align__(1024) char memory[];
  ShadowShared& shared = *reinterpret_cast<ShadowShared*>(memory);
  BurstPlan const& plan = params.plan;
  int const producer = blockIdx.x;
  bool const bursts = producer < plan.producers;
  bool const is_prober = threadIdx.x == kBurstThreads;
  int const dst_rank = destination_of(static_cast<uint32_t>(plan.destinations), producer);

  // Every SM probes; only the first `producers` blocks burst. One block per SM: shared memory.
  StorePath path{};
  if (threadIdx.x < kBurstThreads) path = store_path(params, producer);
  if constexpr (kMechanism == Mechanism::kBulk || kMechanism == Mechanism::kTma) {
    path.first = landing_area(params.workspace, dst_rank) + producer * plan.producer_stride;
    fill_slab(plan, shared.burst, producer);
  }
  if (threadIdx.x == 0) {
    mbarrier_init(&shared.arrived, 1);
    fence_mbarrier_init_release_cluster();
    shared.burst.go_on =
        begin_together(params.workspace, plan.join, gridDim.x, shared.burst.origin);
    shared.turn = shared.burst.origin.go_clock;
  }
  __syncthreads();

  bool const ran = shared.burst.go_on;
  int64_t const num_bursts = ran ? plan.max_bursts : 0;
  int64_t const period = params.gap_cycles[0];
  for (int64_t n = 0; n < num_bursts; ++n) {
    int const parity = n & 1;
    if (threadIdx.x == 0) {
      shared.turn = turn_clock(shared.burst.origin, n * period, plan.clock_khz);
    }
    // Read before the barrier, long before the burst: it must not lie in a shadow itself.
    int32_t const delay = is_prober ? params.delays[n % params.num_delays] : 0;
    __syncthreads();
    int64_t const turn = shared.turn;
    if (is_prober) {
      spin_until(turn + delay);
      probe_once(params, shared, parity);
    } else if (threadIdx.x < kBurstThreads && bursts) {
      spin_until(turn);
      burst_once<kMechanism>(params, shared.burst, path, dst_rank, static_cast<int>(n % plan.slots),
                             parity);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      // Blocks that do not burst report their turn instead.
      int64_t const origin = shared.burst.origin.clock;
      int4 stamp{static_cast<int>(turn - origin), static_cast<int>(turn - origin),
                 static_cast<int>(shared.probe_begin[parity] - origin),
                 static_cast<int>(shared.probe_end[parity] - origin)};
      if (bursts) {
        int4 const own = collect_stamps<kMechanism>(shared.burst, parity);
        stamp.x = own.x;
        stamp.y = own.z;
      }
      params.stamps[producer * plan.max_bursts + n] = stamp;
    }
  }

  if constexpr (kMechanism == Mechanism::kBulk || kMechanism == Mechanism::kTma) {
    if (threadIdx.x == 0) bulk_wait<0>();
  }
  fence_acq_rel_sys();
  __syncthreads();
  if (threadIdx.x == 0) {
    int64_t const clock = clock_now();
    params.heads[producer] = {sm_index(),
                              shared.burst.origin.clock_ns,
                              static_cast<int64_t>(global_timer_ns()),
                              shared.burst.origin.clock,
                              clock,
                              num_bursts,
                              clock - shared.turn,
                              ran && !aborted(params.workspace)};
  }
}

}  // namespace xstage
