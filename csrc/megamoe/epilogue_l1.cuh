// Epilogue of Linear-1: clamp, SiLU(gate) * up, store into the h ring of this rank.
//
// Columns 0 to 127 of the tile are gates, 128 to 255 the matching ups, so a thread holds both of a
// pair in its accumulators. fp32 throughout, rounded once.
#pragma once

#include "outbox.cuh"

namespace xstage {

__device__ __forceinline__ float swiglu(float gate, float up, float clamp) {
  // Comparisons, not fminf: a NaN must come out as a NaN.
  gate = gate > clamp ? clamp : gate;
  up = up > clamp ? clamp : (up < -clamp ? -clamp : up);
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// acc: this thread's part of 64 x 256; element 4 * j + 2 * h + c is column 8 * j + 2 * (lane % 4) + c
// of row lane / 4 + 8 * h of the warp's 16.
template <class Acc>
__device__ __forceinline__ void store_linear1(MegaMoeParams const& params, CallState const& call,
                                              TileWork const& work, Acc const& acc,
                                              Outbox& outbox) {
  using Traits = MegaMoeTraits;
  MegaMoePlan const& plan = params.plan;
  MegaMoeView const own = params.view(params.workspace.rank);
  int const lane = threadIdx.x % 32;
  int const first_row = (threadIdx.x / 32 - 4) * Traits::kWarpRows;
  outbox.drain();
  if (first_row < work.rows) {
    outbox.reserve();
    // Staging holds row r and row r + 8 behind each other: 256 bytes each.
    uint32_t const address = outbox.matrix_address();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t pairs[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          int const i = 4 * (4 * j + q) + 2 * h;
          pairs[q] = pack_bf16(swiglu(acc(i), acc(i + 64), params.clamp),
                               swiglu(acc(i + 1), acc(i + 65), params.clamp));
        }
        store_matrices(address + h * 256 + j * 64, pairs);
      }
    }
    fence_proxy_async_shared();
    __syncwarp();
    int32_t const col = work.n * (Traits::kBlockN / 2);
    uint32_t const bytes = 2 * min_of(Traits::kBlockN / 2, plan.intermediate - col);
    if (lane < Traits::kWarpRows && first_row + lane < work.rows) {
      __nv_bfloat16* const row =
          own.h_block<__nv_bfloat16>(plan, params.layout, work.block) +
          int64_t{1} * (first_row + lane) * plan.intermediate + col;
      bulk_store(row, outbox.staging + lane % 8 * Traits::kStagingRow + lane / 8 * 256, bytes);
      bulk_commit();
    }
  }
  outbox.announce_later(
      own.counter(params.layout, call.bank, MegaMoeCounter::kLinear1Done) + work.block, true);
}

}  // namespace xstage
