// The life of one call of an operator instance, on the device.
//
//   epoch = call_epoch(ws)                    every block, at its start
//   ... store into peers' regions ...
//   arrive_and_publish(ws, epoch, blocks)     one thread per block, at its end
//   wait_for_ranks(ws, epoch, phase)          one warp, in the same kernel or in the next
//
// Flags (writer, order -> reader, order; nobody resets them):
//   arrivals   every block, fence + inc       -> the last block of the same call; wraps to 0
//   from[r]    last block of rank r, fence + st -> wait_for_ranks of this rank, acquire.sys; where
//              blocks add shares: announce_call, st -> wait_for_shares, behind parts[r]
//   parts[r]   every block of rank r, fence + add -> wait_for_shares of this rank, acquire.sys
//   calls      last block, st                 -> the next kernel of this channel, by stream order
//   released   grant_slot of rank r, fence + st -> grant_slot of this rank, acquire.sys
//   failed     any role, or.release.sys       -> every wait, acquire.sys
//
// Requires: calls of one channel follow each other on one stream; every rank makes the same calls
// in the same order and waits for all ranks in each, so that no rank is more than one call ahead.
#pragma once

#include "wait.cuh"

namespace xstage {

// The number of the running call, from 1. The last block advances `calls` only when every block has
// arrived, and so has read it.
__device__ __forceinline__ uint64_t call_epoch(Workspace const& workspace) {
  return ld_relaxed_gpu(&workspace.channel_of(workspace.rank)->calls) + 1;
}

// The number of the last finished call: what a wait kernel behind the operator's kernel waits for.
__device__ __forceinline__ uint64_t finished_epoch(Workspace const& workspace) {
  return ld_acquire_gpu(&workspace.channel_of(workspace.rank)->calls);
}

// One thread per block, after all stores of the block: bulk stores by their issuers' bulk_wait<0>,
// then a block barrier. Every block arrives, also one that gave up, since `arrivals` counts them; a
// call that was aborted publishes nothing. Returns true in the last block.
__device__ __forceinline__ bool arrive_and_publish(Workspace const& workspace, uint64_t epoch,
                                                   uint32_t num_blocks) {
  Channel* const own = workspace.channel_of(workspace.rank);
  fence_proxy_async();
  fence_acq_rel_sys();
  // The fence makes it a release as well.
  if (atom_inc_acquire_gpu(&own->arrivals, num_blocks - 1) != num_blocks - 1) return false;
  // A block that gave up did so before it arrived. Read in front of the fence, whose latency covers
  // that of the load.
  bool const gave_up = aborted(workspace);
  // Cumulative: what the other blocks released above comes before the signals below.
  fence_acq_rel_sys();
  if (!gave_up) {
    for (int64_t i = 1; i <= workspace.world; ++i) {
      int64_t const dst_rank = (workspace.rank + i) % workspace.world;
      // The fence above makes this a release; one of its own per rank would cost a round trip each.
      st_relaxed_sys(&workspace.channel_of(dst_rank)->from[workspace.rank],
                     workspace.signal(epoch));
    }
  }
  // Read by later kernels only, which the end of this one orders.
  st_relaxed_sys(&own->calls, epoch);
  return true;
}

// Whether rank `src_rank`, which has done its part, made the same call and nobody failed. `seen`: its
// signal, `failed`: the failure word, both from the last poll.
__device__ __forceinline__ bool agrees(Workspace const& workspace, WaitSite site, uint64_t seen,
                                       uint64_t failed) {
  uint64_t const expected = workspace.signal(site.epoch);
  // A rank that is already a call ahead has compared this call's digests itself.
  if (signal_epoch(seen) == site.epoch && seen != expected) {
    WaitSite const differs{site.phase, site.src_rank, site.epoch, signal_digest(expected)};
    give_up(workspace, differs, FaultKind::kPlanDiffers, signal_digest(seen), 0);
    return false;
  }
  return failed == 0 || nobody_failed(workspace, site);
}

// One whole warp; lane r waits for rank r and compares digests. Returns the same value in all
// lanes. After true, plain loads see what the peers stored; a TMA load of it in the same kernel
// needs fence_proxy_async() first.
__device__ __forceinline__ bool wait_for_ranks(Workspace const& workspace, uint64_t epoch,
                                               Phase phase) {
  int const src_rank = static_cast<int>(threadIdx.x % 32);
  bool ok = true;
  if (src_rank < workspace.world) {
    uint64_t const* const word = &workspace.channel_of(workspace.rank)->from[src_rank];
    uint64_t const* const failed_word = &workspace.control(workspace.rank)->failed;
    WaitSite const site{phase, src_rank, epoch, epoch};
    uint64_t seen = 0, failed = 0;
    ok = wait_until(workspace, site, [&] {
      failed = ld_relaxed_sys(failed_word);  // beside the other load, not behind it
      return signal_epoch(seen = ld_acquire_sys(word));
    });
    ok = ok && agrees(workspace, site, seen, failed);
  }
  return __all_sync(0xffffffffu, ok);
}

// The end of a call in two round trips less, for an operator whose last block waits itself: every
// block tells the peers, instead of the last one for all of them.
//
//   call = shared_call(ws)                              every block, at its start
//   announce_call(ws, epoch)                            one warp of the rank, before its block's end
//   add_share(ws, epoch, call, block, blocks)           one thread per block, at its end
//   wait_for_shares(ws, epoch, call, phase)             one warp of the block that was the last

// How many calls of this kind the channel will have made with this one. Shares that other blocks
// have added already do not make a whole.
__device__ __forceinline__ uint64_t shared_call(Workspace const& workspace) {
  uint64_t const* const own = &workspace.channel_of(workspace.rank)->parts[workspace.rank];
  return (ld_relaxed_gpu(own) >> kWholeCallBits) + 1;
}

// One whole warp. Says which call this is, for the comparison at its end.
__device__ __forceinline__ void announce_call(Workspace const& workspace, uint64_t epoch) {
  int const lane = static_cast<int>(threadIdx.x % 32);
  if (lane >= workspace.world) return;
  st_relaxed_sys(&workspace.channel_of(lane)->from[workspace.rank], workspace.signal(epoch));
}

// As arrive_and_publish: after all stores of the block, also when it gave up; then its share does not
// reach the peers. Returns true in the last block.
__device__ __forceinline__ bool add_share(Workspace const& workspace, uint64_t epoch, uint64_t call,
                                          uint32_t block, uint32_t num_blocks) {
  bool const gave_up = aborted(workspace);
  fence_proxy_async();
  fence_acq_rel_sys();
  uint64_t const share = share_of_call(block, num_blocks);
  for (int64_t i = 1; i < workspace.world && !gave_up; ++i) {
    int64_t const dst_rank = (workspace.rank + i) % workspace.world;
    // The fence above makes this a release; additions to one word carry each other's.
    red_add_relaxed_sys(&workspace.channel_of(dst_rank)->parts[workspace.rank], share);
  }
  Channel* const own = workspace.channel_of(workspace.rank);
  uint64_t const before = atom_add_relaxed_sys(&own->parts[workspace.rank], share);
  if ((before + share) >> kWholeCallBits != call) return false;
  // Read by later kernels only, which the end of this one orders.
  st_relaxed_sys(&own->calls, epoch);
  return true;
}

// As wait_for_ranks.
__device__ __forceinline__ bool wait_for_shares(Workspace const& workspace, uint64_t epoch,
                                                uint64_t call, Phase phase) {
  int const src_rank = static_cast<int>(threadIdx.x % 32);
  bool ok = true;
  if (src_rank < workspace.world) {
    Channel const* const own = workspace.channel_of(workspace.rank);
    uint64_t const* const failed_word = &workspace.control(workspace.rank)->failed;
    WaitSite const site{phase, src_rank, epoch, call};
    uint64_t seen = 0, failed = 0;
    ok = wait_until(workspace, site, [&] {
      failed = ld_relaxed_sys(failed_word);
      seen = ld_relaxed_sys(&own->from[src_rank]);
      return ld_acquire_sys(&own->parts[src_rank]) >> kWholeCallBits;
    });
    // The announcement came before the shares, but perhaps after it was looked for.
    if (ok && signal_epoch(seen) < epoch) seen = ld_relaxed_sys(&own->from[src_rank]);
    ok = ok && agrees(workspace, site, seen, failed);
  }
  return __all_sync(0xffffffffu, ok);
}

// Fills memory with all-ones bytes: NaN in every floating type. Called by all threads of a group.
__device__ __forceinline__ void poison(void* bytes, int64_t num_bytes, int thread_idx,
                                       int num_threads) {
  for (int64_t i = thread_idx; i < num_bytes; i += num_threads) {
    static_cast<unsigned char*>(bytes)[i] = 0xff;
  }
}

// Output slots (slots.h), before a call that stores into slot `slot` of every rank. In two steps,
// so that an operator may take them in its own kernel: one warp of the rank announces, every block
// waits, and the block that ends the call records the use.

// One whole warp. `free_slots` has a bit for every slot that nobody on this rank's stream reads any
// more, and always bit `slot`. Idempotent per call, so it replays in CUDA graphs.
__device__ __forceinline__ void announce_slots(Workspace const& workspace, uint64_t epoch,
                                               uint32_t free_slots) {
  int const lane = static_cast<int>(threadIdx.x % 32);
  if (lane >= workspace.world) return;
  // Earlier kernels of this stream have read the slots; the fence puts that before the release.
  fence_proxy_async();
  fence_acq_rel_sys();
  Channel* const dst = workspace.channel_of(lane);
  for (int s = 0; s < kMaxSlots; ++s) {
    if ((free_slots >> s) & 1) st_relaxed_sys(&dst->released[s][workspace.rank], epoch);
  }
}

// One whole warp: waits until every rank has released `slot` since its last use.
__device__ __forceinline__ bool wait_for_slot(Workspace const& workspace, uint64_t epoch,
                                              int slot) {
  int const lane = static_cast<int>(threadIdx.x % 32);
  Channel const* const own = workspace.channel_of(workspace.rank);
  bool ok = true;
  if (lane < workspace.world) {
    uint64_t const* const word = &own->released[slot][lane];
    // Only an earlier call, or another block of this one that waits here too, can have given up.
    ok = !aborted(workspace);
    WaitSite const site{Phase::kSlotCredit, lane, epoch, own->last_use[slot] + 1};
    ok = wait_until(workspace, site, [&] { return ld_acquire_sys(word); }) && ok;
  }
  return __all_sync(0xffffffffu, ok);
}

// One thread, when nobody waits for the slot any more.
__device__ __forceinline__ void record_slot_use(Workspace const& workspace, uint64_t epoch,
                                                int slot) {
  workspace.channel_of(workspace.rank)->last_use[slot] = epoch;
}

// The call that was granted a slot last.
__device__ __forceinline__ uint64_t slot_epoch(Workspace const& workspace, int slot) {
  return ld_relaxed_gpu(&workspace.channel_of(workspace.rank)->last_use[slot]);
}

// All three for one warp before the operator's kernel. Later calls rarely wait.
__device__ __forceinline__ bool grant_slot(Workspace const& workspace, int slot,
                                           uint32_t free_slots) {
  uint64_t const epoch = call_epoch(workspace);
  announce_slots(workspace, epoch, free_slots);
  bool const ok = wait_for_slot(workspace, epoch, slot);
  if (ok && threadIdx.x % 32 == 0) record_slot_use(workspace, epoch, slot);
  return ok;
}

}  // namespace xstage
