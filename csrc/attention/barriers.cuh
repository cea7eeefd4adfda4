// Barriers of the attention kernels: the stages of a TMA ring, and the turn that math warpgroups
// pass round.
//
//   RingState   which stage of a ring is next, and in which phase
//   Turn        the right to issue matrix products; it goes round the math warpgroups
#pragma once

#include <cutlass/arch/barrier.h>

#include <cstdint>

namespace xstage {

using MBarrier = cutlass::arch::ClusterTransactionBarrier;

constexpr int kWarpgroup = 128;

// Position in a ring of kStages stages. A consumer waits for `phase`, a producer for `phase ^ 1`:
// the first lap of a producer finds every stage free.
template <int kStages>
struct RingState {
  uint32_t stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Warpgroups issue their products one after the other, so that the softmax of one runs while the
// tensor cores work for another. One named barrier per warpgroup, joined by its owner and by the
// warpgroup before it. All warpgroups must take the same number of turns.
template <int kGroups, int kFirstBarrier>
struct Turn {
  int group;

  // The last warpgroup hands the first turn to group 0.
  __device__ __forceinline__ void open() const {
    if (kGroups > 1 && group == kGroups - 1) pass();
  }
  __device__ __forceinline__ void take() const {
    if constexpr (kGroups > 1) {
      cutlass::arch::NamedBarrier::sync(2 * kWarpgroup, kFirstBarrier + group);
    }
  }
  __device__ __forceinline__ void pass() const {
    if constexpr (kGroups > 1) {
      int const next = group + 1 == kGroups ? 0 : group + 1;
      cutlass::arch::NamedBarrier::arrive(2 * kWarpgroup, kFirstBarrier + next);
    }
  }
  // Takes back the turn that nobody will use, so that no barrier is left half full.
  __device__ __forceinline__ void close() const {
    if (kGroups > 1 && group == 0) take();
  }
};

}  // namespace xstage
