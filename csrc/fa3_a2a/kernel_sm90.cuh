// Attention on Hopper whose output tiles go straight to the ranks that own their rows.
//
// Computes  out = softmax(scale Q K^T + mask) V, lse = log of the softmax's denominator, for this
//           rank's heads over all rows; 16-bit operands, float32 accumulation and softmax.
// Sends     every finished tile (up to block_m rows of one head) into the owner's [B, rows, H, D]:
//           at once (burst) or in slices along the next tile's main loop (paced). The X-Stage
//           action is piggyback: the warpgroup that computed a tile issues its stores and goes on.
//
// Roles (warpgroups of 128 threads)
//   0            load    24 or 32 registers   one thread: K one block ahead of V, Q per warpgroup
//   1 ..         math    240 or 160           64 query rows each: mainloop.cuh, epilogue_a2a.cuh
//
// Shared memory  q and o: 64 rows per math warpgroup each; k, v: two stages of block_n rows. All
//                swizzled by 128 bytes (attention/loads.cuh).
//
// Barriers (g: math warpgroup, s: stage)
//   q_full[g], k_full[s], v_full[s]   one arrival and the bytes; load -> math
//   q_empty[g]                        4 arrivals, one per warp; math g -> load
//   k_empty[s], v_empty[s]            4 arrivals per math warpgroup; math -> load
//   turn    named, 256 threads: the right to issue products goes round the math warpgroups
//   staged  named, 128 threads: a warpgroup's output buffer is free, then full
//   done    named, all math threads, once: every store of the block is complete
//
// Global protocol  no block waits for a peer. A kernel before this one takes the output slot, the
//                  last block publishes the epoch, a kernel behind this one waits for all ranks
//                  (attention/completion.cuh, common/channel.cuh). Both overlap with this one: the
//                  grant with the first tiles, the wait with the end of the last.
// Requires  head size 64 or 128; operands that tensor maps can describe, positive scale
//           (attention/ops_cuda.cu checks or copies). A tile never crosses the border between two
//           owners (TileSchedule), so stores start inside their tensor and only overhang its end.
// Cost      csrc/fa3_a2a/README.md
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "epilogue_a2a.cuh"
#include "mainloop.cuh"

namespace xstage {

template <class Traits>
__device__ __forceinline__ void math_role(AttentionParams const& params,
                                          Fa3SharedStorage<Traits>& smem, TileWalk walk, int group,
                                          int thread) {
  MathRole<Traits> math(params, smem, group, thread);
  Epilogue<Traits> epilogue(params, smem, group, thread);
  typename MathRole<Traits>::FragmentO out;  // ((2,2,D/8),1,1)
  QueryTile tile;
  while (walk.next(tile)) {
    typename MathRole<Traits>::Softmax softmax(params.scale_log2);
    float inverse[2] = {0.0f, 0.0f}, lse[2] = {-INFINITY, -INFINITY};
    if (math.run(tile, out, softmax, [&] { epilogue.each_step(); })) {
      softmax.finish(inverse, lse);
    } else {
      cute::clear(out);
    }
    epilogue.store(tile, out, inverse);
    epilogue.store_lse(tile, lse);
  }
  math.close();
  epilogue.finish();
  publish_block<Traits::kMathGroups * kWarpgroup, kDoneBarrier>(params.workspace,
                                                                group * kWarpgroup + thread);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    fa3_kernel(__grid_constant__ AttentionParams const params) {
  extern __shared__ __align__(1024) char storage[];
  auto& smem = *reinterpret_cast<Fa3SharedStorage<Traits>*>(storage);
  int const warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  int const thread = threadIdx.x % kWarpgroup;
  if (threadIdx.x == 0) {
    for (int group = 0; group < Traits::kMathGroups; ++group) {
      smem.q_full[group].init(1);
      smem.q_empty[group].init(kWarpgroup / 32);
    }
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      smem.k_full[stage].init(1);
      smem.v_full[stage].init(1);
      smem.k_empty[stage].init(Traits::kMathGroups * kWarpgroup / 32);
      smem.v_empty[stage].init(Traits::kMathGroups * kWarpgroup / 32);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  TileWalk const walk{params.schedule, params.num_rounds, static_cast<int32_t>(blockIdx.x),
                      static_cast<int32_t>(gridDim.x),
                      params.schedule.num_groups == 0 ? kNoTiles : 0};
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kLoadRegisters>();
    if (thread == 0) load_role<Traits>(params, smem, walk);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kMathRegisters>();
    math_role<Traits>(params, smem, walk, warpgroup - 1, thread);
  }
}

}  // namespace xstage
