// Barriers in shared memory, and what the warps of a block share.
#pragma once

#include <cutlass/bfloat16.h>

#include "common/mbarrier.cuh"
#include "common/wait.cuh"
#include "layout.h"
#include "schedule.h"
#include "traits_sm90.h"

namespace xstage {

// Arrives at the same barrier of CTA `cta` of the cluster (this one included). What it announces
// are reads that have completed, so it needs no order at cluster scope, which would cost a fence of
// all memory per step (`.release.cluster` compiles to MEMBAR.ALL.GPU: 520 instead of 700 TFLOP/s).
__device__ __forceinline__ void mbarrier_arrive_cluster(uint64_t* barrier, uint32_t cta) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(smem_address(barrier)),
      "r"(cta)
      : "memory");
}
// Writes a word into the shared memory of CTA `cta` of the cluster; its barrier there counts the 4
// bytes when the word is in place.
__device__ __forceinline__ void store_async_cluster(int32_t* word, int32_t value, uint64_t* barrier,
                                                    uint32_t cta) {
  asm volatile(
      "{\n"
      ".reg .b32 there, done;\n"
      "mapa.shared::cluster.u32 there, %0, %3;\n"
      "mapa.shared::cluster.u32 done, %2, %3;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.s32 [there], %1, [done];\n"
      "}" ::"r"(smem_address(word)),
      "r"(value), "r"(smem_address(barrier)), "r"(cta)
      : "memory");
}
// Needs no deadline of its own: who feeds the barrier waits for global memory under one (wait.cuh),
// and gives up for the whole rank, both CTAs of the cluster included.
__device__ __forceinline__ bool mbarrier_wait(uint64_t* barrier, uint32_t parity,
                                              Workspace const& workspace) {
  for (uint32_t polls = 1; !mbarrier_try_wait(barrier, parity); ++polls) {
    if (polls % 64 == 0 && aborted(workspace)) return false;
  }
  return true;
}

__device__ __forceinline__ void named_barrier_sync(NamedBarrier barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(barrier)), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(NamedBarrier barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(static_cast<int>(barrier)), "r"(threads) : "memory");
}

// The same, and true when `value` holds in all of these threads.
__device__ __forceinline__ bool named_barrier_all(int barrier, int threads, bool value) {
  uint32_t all;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "bar.red.and.pred q, %2, %3, p;\n"
      "selp.b32 %0, 1, 0, q;\n"
      "}"
      : "=r"(all)
      : "r"(static_cast<uint32_t>(value)), "r"(barrier), "r"(threads)
      : "memory");
  return all != 0;
}

// True when `value` holds in all threads of this math warpgroup.
__device__ __forceinline__ bool warpgroup_all(bool value) {
  int const group = static_cast<int>(threadIdx.x / 128) - 1;
  return named_barrier_all(static_cast<int>(NamedBarrier::kMathGroup) + group, 128, value);
}

// The value of lane 0, which the compiler then knows to be the same in all lanes.
__device__ __forceinline__ int32_t uniform(int32_t value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

// The sum of the values of this lane and those before it.
template <class T>
__device__ __forceinline__ T warp_inclusive_sum(T value) {
  int const lane = threadIdx.x % 32;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    T const other = __shfl_up_sync(0xffffffffu, value, d);
    if (lane >= d) value += other;
  }
  return value;
}

// What kLinear1Done and kLinear2Done of a block come to when all of its tiles are done.
__device__ __forceinline__ uint32_t whole_linear1(MegaMoePlan const& plan) {
  return plan.linear1_tiles() * MegaMoeTraits::kTileCount;
}
__device__ __forceinline__ uint32_t whole_linear2(MegaMoePlan const& plan) {
  return plan.linear2_tiles() * MegaMoeTraits::kTileCount;
}

// Position in the ring of stages.
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == MegaMoeTraits::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// What the scheduler tells the loader, and the loader's first `full` barrier the math warps, about
// a tile.
struct TileWork {
  TilePhase phase;  // kNone with num_k > 0: only keep step with the partner
  TileShare share;
  int32_t num_k;  // 0: no more tiles
  int32_t block;
  int32_t rows;
  int32_t n;
  int32_t expert;
  int32_t ring_row;  // first row of the block in the h ring
};

// The part of a tile that a math warpgroup computes.
struct WarpgroupWork {
  TilePhase phase;
  int32_t block;
  int32_t rows;  // of the block
  int32_t n;
  int32_t ring_row;
  bool halved;     // only 128 of the 256 columns
  int32_t half;    // halved: which
  uint32_t count;  // what a warp adds to the counters of the block
};

// Where a warp's results wait to be added up, see combine.cuh.
struct CombineRing {
  static constexpr int kPieces = 8;
  static constexpr int kBytes = 2048;  // of a piece
  char pieces[kPieces][kBytes];
  uint64_t full[kPieces];
};

struct MegaMoeShared {
  using Traits = MegaMoeTraits;
  struct Stage {
    cutlass::bfloat16_t a[Traits::kBlockM * Traits::kBlockK];  // (BLK_M,BLK_K) swizzled, 16 KiB
    cutlass::bfloat16_t b[Traits::kBlockN * Traits::kBlockK];  // (BLK_N,BLK_K) swizzled, 32 KiB
  };
  // Before the first load, the dispatch prologue counts there.
  struct Routing {
    uint32_t counts[MegaMoeLimits::num_experts];     // rows of this block's tokens per expert
    uint32_t positions[MegaMoeLimits::num_experts];  // where the next of them goes in its list
  };
  union {
    Stage stages[Traits::kStages];
    Routing routing;
    CombineRing combine[Traits::kDispatchWarps + Traits::kMathWarps];  // when the tiles are done
  };
  char staging[Traits::kMathWarps][Traits::kStagingRows * Traits::kStagingRow];
  TileWork tiles[Traits::kTileQueue];
  uint32_t rows[kMaxLocalExperts];      // rows received per local expert: fixes the schedule
  int32_t tickets[Traits::kTileQueue];  // CTA 1: which cluster tile comes next
  uint64_t ticket_full[Traits::kTileQueue];
  uint64_t tile_ready[Traits::kTileQueue];      // scheduler -> loader: the entry
  uint64_t operands_ready[Traits::kTileQueue];  // its rows or activations
  uint64_t tile_taken[Traits::kTileQueue];      // loader -> scheduler: prepare the next
  uint64_t full[Traits::kStages];
  uint64_t empty[Traits::kStages];
  uint64_t epoch;
  uint32_t sent[kMaxRanks];  // rows of this rank's tokens per owner
  uint32_t ok;
};
static_assert(sizeof(MegaMoeShared) <= 232448, "227 KiB per block");

// What every role needs of the call.
struct CallState {
  uint64_t epoch;
  int32_t bank;
  int32_t num_tokens;
  int32_t block;       // of this rank
  int32_t num_blocks;  // of this rank

  // Rows of an expert stand in the order of these groups.
  __device__ __forceinline__ int32_t route_group() const {
    return block * kRouteGroups / num_blocks;
  }
};

}  // namespace xstage
