// Combine: y[token] = routed_scale * sum over slots, in ascending order, of weight * result, in
// fp32.
//
// At the end: by the math warps of every block when all ranks have stored all results
// (Channel::from). Early: ranks work through their experts in order; when all of them have finished
// their n-th expert (kExpertDone), tokens that need no later one are added up by warps 1 to 3, and
// only the tokens of the last turn are left for the end. One order of addition, whatever the
// schedule and the plan, so that results are bitwise the same.
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
    float2 const pair = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 const*>(&words[i]));
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
  char const* const rows =
      own.combine_row<char>(plan, params.layout, 0, 0) + int64_t{2} * token * plan.hidden;
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
        words[i] =
            pack_bf16(acc[c][2 * i] * params.routed_scale, acc[c][2 * i + 1] * params.routed_scale);
      }
      *reinterpret_cast<uint4*>(y + offset + c * 512) = out;
    }
  }
}

// One token by one warp, or a row that is no token, which becomes zero.
__device__ __forceinline__ void combine_row_of(MegaMoeParams const& params, CallState const& call,
                                               int32_t token) {
  int const lane = threadIdx.x % 32;
  bool const valid = lane < params.plan.topk && token < call.num_tokens &&
                     expert_of(params, int64_t{1} * token * params.plan.topk + lane) >= 0;
  combine_token(params, token, __ballot_sync(0xffffffffu, valid));
}

// Where in the order of every rank's experts the last of a token's experts stands; 0 without any.
__device__ __forceinline__ int32_t last_turn(MegaMoeParams const& params, CallState const& call,
                                             int32_t token) {
  if (token >= call.num_tokens) return 0;
  int32_t turn = 0;
  for (int32_t slot = 0; slot < params.plan.topk; ++slot) {
    int32_t const expert = expert_of(params, int64_t{1} * token * params.plan.topk + slot);
    if (expert >= 0) turn = max_of(turn, expert % params.plan.experts_per_rank());
  }
  return turn;
}

// The rows of y whose last expert has this turn, shared out over `stride` warps.
__device__ __forceinline__ void combine_turn(MegaMoeParams const& params, CallState const& call,
                                             int32_t turn, int32_t first, int32_t stride) {
  int const lane = threadIdx.x % 32;
  for (int32_t row = first; row < params.rows; row += 32 * stride) {
    int32_t const mine = row + lane * stride;
    bool const due = mine < params.rows && last_turn(params, call, mine) == turn;
    for (uint32_t left = __ballot_sync(0xffffffffu, due); left != 0; left &= left - 1) {
      combine_row_of(params, call, row + (__ffs(left) - 1) * stride);
    }
  }
}

// Early combine, warps 1 to 3 when they have pulled their rows: tells the sources which experts of
// this rank are done, and adds up tokens whose experts are, except for the last turn.
__device__ __forceinline__ void combine_early(MegaMoeParams const& params, CallState const& call,
                                              MegaMoeShared const& shared) {
  using Traits = MegaMoeTraits;
  MegaMoePlan const& plan = params.plan;
  MegaMoeView const own = params.view(params.workspace.rank);
  int32_t const rank = static_cast<int32_t>(params.workspace.rank);
  int32_t const per_rank = plan.experts_per_rank();
  int const lane = threadIdx.x % 32;
  int const warp = threadIdx.x / 32 - 1;
  uint32_t const* const stored =
      own.counter(params.layout, call.bank, MegaMoeCounter::kExpertStored);
  // One warp per expert; the last turn is announced by the end of the call.
  for (int32_t expert = call.block; warp == 0 && expert < per_rank - 1; expert += call.num_blocks) {
    WaitSite const site{Phase::kLinear2Ready, -1, call.epoch,
                        uint64_t{1} * shared.rows[expert] * plan.linear2_tiles()};
    bool const ok = wait_until(params.workspace, site,
                               [&]() -> uint64_t { return ld_acquire_gpu(stored + expert); });
    if (!ok) return;
    if (lane < plan.world) {
      st_release_sys(params.view(lane).expert_done(params.layout, rank * per_rank + expert),
                     call.epoch);
    }
  }
  int32_t const first = call.block * Traits::kDispatchWarps + warp;
  for (int32_t turn = 0; turn < per_rank - 1; ++turn) {
    bool ok = true;
    if (lane < plan.world) {
      uint64_t const* const word = own.expert_done(params.layout, lane * per_rank + turn);
      WaitSite const site{Phase::kCombineArrival, lane, call.epoch, call.epoch};
      ok = wait_until(params.workspace, site, [&] { return ld_acquire_sys(word); });
    }
    if (!__all_sync(0xffffffffu, ok)) return;
    combine_turn(params, call, turn, first, call.num_blocks * Traits::kDispatchWarps);
  }
}

// The math warps of all blocks, when all ranks have stored all results.
__device__ __forceinline__ void combine_tokens(MegaMoeParams const& params, CallState const& call) {
  using Traits = MegaMoeTraits;
  int32_t const stride = call.num_blocks * Traits::kMathWarps;
  int32_t const first = call.block * Traits::kMathWarps + threadIdx.x / 32 - 4;
  if (params.plan.combine == kCombineEarly) {
    combine_turn(params, call, params.plan.experts_per_rank() - 1, first, stride);
    return;
  }
  for (int32_t row = first; row < params.rows; row += stride) combine_row_of(params, call, row);
}

}  // namespace xstage
