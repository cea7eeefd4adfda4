// Begin and end of a call whose output tiles go to other ranks.
//
// Begin: the kernel starts while its output slot is still being granted. Storing threads wait for
// the grant before their first store, behind a whole tile of products. A rank that was refused its
// slot, or that failed before, stores nothing.
//
// End: each storing thread waits until its own bulk stores are written (not merely read from shared
// memory), the math warpgroups meet, and one thread arrives for the block; the last block of the
// grid publishes the epoch to every rank (common/channel.cuh). No block ever waits for a peer.
#pragma once

#include "barriers.cuh"
#include "common/channel.cuh"
#include "params.h"

namespace xstage {

// A storing thread, before each of its stores: comes behind the kernel before, which grants the slot
// or, alone, may still read what is overwritten. Not zero when it may not store.
__device__ __forceinline__ uint32_t stores_refused(uint8_t const* refused) {
  wait_for_kernel_before();
  return refused == nullptr ? 0 : ld_relaxed_sys(refused);
}

// A storing thread, when it has issued its last store: the kernel behind may come, with peers the
// one that waits for the ranks.
__device__ __forceinline__ void announce_end() {
  launch_dependent_kernel();
}

// All threads of the math warpgroups, after their stores are complete.
template <int kMathThreads, int kBarrier>
__device__ __forceinline__ void publish_block(Workspace const& workspace, int math_thread) {
  if (workspace.world == 0) return;
  cutlass::arch::NamedBarrier::sync(kMathThreads, kBarrier);
  if (math_thread == 0) arrive_and_publish(workspace, call_epoch(workspace), gridDim.x);
}

}  // namespace xstage
