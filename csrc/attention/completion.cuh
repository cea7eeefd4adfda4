// Begin and end of a call whose output tiles go to other ranks.
//
// Begin: a rank that was refused its output slot, or that failed before, stores nothing.
// End: each storing thread waits until its own bulk stores are written (not merely read from shared
// memory), the math warpgroups meet, and one thread arrives for the block; the last block of the
// grid publishes the epoch to every rank (common/channel.cuh). No block ever waits for a peer.
#pragma once

#include "barriers.cuh"
#include "common/channel.cuh"
#include "params.h"

namespace xstage {

// One thread per block.
__device__ __forceinline__ bool may_store(Workspace const& workspace) {
  return workspace.world == 0 || !aborted(workspace);
}

// All threads of the math warpgroups, after their stores are complete.
template <int kMathThreads, int kBarrier>
__device__ __forceinline__ void publish_block(Workspace const& workspace, int math_thread) {
  if (workspace.world == 0) return;
  cutlass::arch::NamedBarrier::sync(kMathThreads, kBarrier);
  if (math_thread == 0) arrive_and_publish(workspace, call_epoch(workspace), gridDim.x);
}

}  // namespace xstage
