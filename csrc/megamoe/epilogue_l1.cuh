// Epilogue of Linear-1: clamp, SiLU(gate) * up, store into the h ring of this rank.
//
// Columns 0 to 63 and 128 to 191 of the tile are gates, the 64 behind each the matching ups, so a
// thread holds both of a pair in its accumulators. fp32 throughout, rounded once.
//
// Cost: two special-function instructions per element, 1024 cycles per tile and warp. They are
// issued in batches of 16, since a chain of one element at a time took 8,500 cycles, which the
// other math warpgroup cannot hide behind four stages.
#pragma once

#include "common/math.cuh"
#include "outbox.cuh"

namespace xstage {

// gate becomes SiLU(gate) * up, for kCount independent elements.
template <int kCount>
__device__ __forceinline__ void swiglu(float (&gate)[kCount], float const (&up)[kCount],
                                       float clamp) {
  constexpr float kMinusLog2E = -1.4426950408889634f;
  float sigmoid[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) gate[i] = min_nan(gate[i], clamp);
#pragma unroll
  for (int i = 0; i < kCount; ++i) sigmoid[i] = exp2_approx(gate[i] * kMinusLog2E);
#pragma unroll
  for (int i = 0; i < kCount; ++i) sigmoid[i] = reciprocal_approx(1.0f + sigmoid[i]);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    gate[i] = gate[i] * sigmoid[i] * max_nan(min_nan(up[i], clamp), -clamp);
  }
}

// acc: this thread's part of 64 x 256; element 4 * j + 2 * h + c is column 8 * j + 2 * (lane % 4) +
// c of row lane / 4 + 8 * h of the warp's 16. Half h of the rows and half j of the columns become
// activations, in staging at `address`.
template <class Acc>
__device__ __forceinline__ void stage_activations(Acc const& acc, int h, int j, float clamp,
                                                  uint32_t address) {
  float gate[16], up[16];
#pragma unroll
  for (int q = 0; q < 8; ++q) {
    int const i = 4 * (16 * j + q) + 2 * h;
    gate[2 * q] = acc(i), gate[2 * q + 1] = acc(i + 1);
    up[2 * q] = acc(i + 32), up[2 * q + 1] = acc(i + 33);
  }
  swiglu(gate, up, clamp);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    uint32_t pairs[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      pairs[q] = pack_bf16(gate[8 * m + 2 * q], gate[8 * m + 2 * q + 1]);
    }
    store_matrices(address + m * 64, pairs);
  }
}

template <class Acc>
__device__ __forceinline__ void store_linear1(MegaMoeParams const& params, CallState const& call,
                                              WarpgroupWork const& work, Acc const& acc,
                                              Outbox& outbox) {
  using Traits = MegaMoeTraits;
  MegaMoePlan const& plan = params.plan;
  MegaMoeView const own = params.view(params.workspace.rank);
  int const lane = threadIdx.x % 32;
  int const first_row = (threadIdx.x / 32 - 4) * Traits::kWarpRows;
  outbox.drain(params);
  if (first_row < work.rows) {
    outbox.reserve();
    // Staging holds row r and row r + 8 behind each other: 256 bytes each.
    uint32_t const address = outbox.matrix_address();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (j == 1 && work.halved) continue;
        stage_activations(acc, h, j, params.clamp, address + h * 256 + j * 128);
      }
    }
    __syncwarp();
    // Half a warp per row: 16 bytes per lane, to the L2 of this GPU.
    int32_t const col = work.n * (Traits::kBlockN / 2) + work.half * 64 + lane % 16 * 8;
    bool const inside = col < plan.intermediate && lane % 16 < (work.halved ? 8 : 16);
    __nv_bfloat16* const to =
        own.at<__nv_bfloat16>(params.layout, MegaMoeRegion::kHRing) +
        int64_t{1} * (work.ring_row + first_row + lane / 16 * 8) * plan.intermediate + col;
    char const* const from = outbox.staging + lane * 16;
#pragma unroll
    for (int r = 0; r < Outbox::kHalf; ++r) {
      uint4 const value = *reinterpret_cast<uint4 const*>(from + r * Traits::kStagingRow);
      bool const valid = first_row + r + lane / 16 * 8 < work.rows && inside;
      if (valid) *reinterpret_cast<uint4*>(to + int64_t{1} * r * plan.intermediate) = value;
    }
    __syncwarp();
  }
  outbox.forget_held();
  outbox.announce_later({params, call, MegaMoeCounter::kLinear1Done, work.block,
                         static_cast<int32_t>(work.count), Announce::kStores});
}

}  // namespace xstage
