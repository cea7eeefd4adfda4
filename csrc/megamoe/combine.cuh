// Combine: y[token] = routed_scale * sum over slots, in ascending order, of weight * result, in fp32.
//
// Run by the math warps of every block when all ranks have stored all results (Channel::from). One
// order of addition, whatever the schedule and the plan, so that results are bitwise the same.
#pragma once

#include "common/channel.cuh"
#include "dispatch.cuh"
#include "outbox.cuh"

namespace xstage {

// Eight elements of a row: acc += weight * value.
__device__ __forceinline__ void add_weighted(float (&acc)[8], uint4 const& value, float weight) {
  uint32_t const words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 const pair =
        __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 const*>(&words[i]));
    acc[2 * i] = fmaf(weight, pair.x, acc[2 * i]);
    acc[2 * i + 1] = fmaf(weight, pair.y, acc[2 * i + 1]);
  }
}

// One token by one warp. Bit s of `used`: slot s counts.
__device__ __forceinline__ void combine_token(MegaMoeParams const& params, int32_t token,
                                              uint32_t used) {
  constexpr int kBatch = 4;  // slots whose loads are in flight together
  MegaMoePlan const& plan = params.plan;
  MegaMoeView const own = params.view(params.workspace.rank);
  int const lane = threadIdx.x % 32;
  char const* const rows = own.combine_row<char>(plan, params.layout, 0, token);
  int64_t const slot_stride = int64_t{2} * plan.max_tokens * plan.hidden;
  float const* const weights = params.topk_weights + int64_t{1} * token * plan.topk;
  char* const y = reinterpret_cast<char*>(params.y + int64_t{1} * token * plan.hidden);
  int32_t const row_bytes = 2 * plan.hidden;
  // Two chunks of 512 bytes at a time.
  for (int32_t offset = lane * 16; offset < row_bytes; offset += 1024) {
    bool const two = offset + 512 < row_bytes;
    float acc[2][8] = {};
    uint32_t left = used;
    while (left != 0) {
      uint4 values[kBatch][2];
      uint32_t ahead = left;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (ahead == 0) continue;
        char const* const from = rows + (__ffs(ahead) - 1) * slot_stride + offset;
        ahead &= ahead - 1;
        values[b][0] = __ldcg(reinterpret_cast<uint4 const*>(from));
        values[b][1] = two ? __ldcg(reinterpret_cast<uint4 const*>(from + 512)) : uint4{};
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (left == 0) continue;
        float const slot_weight = __ldg(weights + __ffs(left) - 1);
        left &= left - 1;
        add_weighted(acc[0], values[b][0], slot_weight);
        add_weighted(acc[1], values[b][1], slot_weight);
      }
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (c == 1 && !two) continue;
      uint4 out;
      uint32_t* const words = reinterpret_cast<uint32_t*>(&out);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = pack_bf16(acc[c][2 * i] * params.routed_scale,
                             acc[c][2 * i + 1] * params.routed_scale);
      }
      *reinterpret_cast<uint4*>(y + offset + c * 512) = out;
    }
  }
}

// The math warps of all blocks. Rows that are no tokens become zero.
__device__ __forceinline__ void combine_tokens(MegaMoeParams const& params, CallState const& call) {
  using Traits = MegaMoeTraits;
  int32_t const topk = params.plan.topk;
  int const lane = threadIdx.x % 32;
  int32_t const stride = call.num_blocks * Traits::kMathWarps;
  for (int32_t token = call.block * Traits::kMathWarps + threadIdx.x / 32 - 4;
       token < params.rows; token += stride) {
    bool const valid =
        lane < topk && token < call.num_tokens && expert_of(params, call, int64_t{1} * token * topk + lane) >= 0;
    combine_token(params, token, __ballot_sync(0xffffffffu, valid));
  }
}

}  // namespace xstage
