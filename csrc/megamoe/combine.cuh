// Combine: y[token] = routed_scale * sum over slots, in ascending order, of weight * result, in
// fp32.
//
// By the math and dispatch warps of every block when all ranks have stored all results
// (Channel::from); these come by bulk copies into rings in the memory of the stages. One order of
// addition, whatever the schedule and the plan, so that results are bitwise the same.
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

// Eight elements of y.
__device__ __forceinline__ void store_sum(char* to, float const (&acc)[8], float scale) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = pack_bf16(acc[2 * i] * scale, acc[2 * i + 1] * scale);
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

// What a warp knows of a token before it adds up: lane s < topk holds slot s.
struct TokenSlots {
  float weight;
  bool used;
};

__device__ __forceinline__ TokenSlots load_slots(MegaMoeParams const& params, CallState const& call,
                                                 int32_t token) {
  int const lane = threadIdx.x % 32;
  TokenSlots slots{0.0f, false};
  if (lane < params.plan.topk && token < call.num_tokens) {
    int64_t const choice = int64_t{1} * token * params.plan.topk + lane;
    slots.used = expert_of(params, choice) >= 0;
    slots.weight = __ldg(params.topk_weights + choice);
  }
  return slots;
}

// What a warp adds up: units first, first + stride, ... of rows, or of pieces of rows where those
// are few, so that every SM has a part: `split` units to a row, which take its pieces in turns. Unit
// u belongs to block u mod num_blocks (poison_units relies on it). The slots of the first two are
// read before the results are there.
struct CombineUnits {
  int32_t ring;
  int32_t first;
  int32_t stride;
  int32_t split;
  TokenSlots slots;
  TokenSlots next;

  __device__ __forceinline__ CombineUnits(MegaMoeParams const& params, CallState const& call) {
    using Traits = MegaMoeTraits;
    ring = threadIdx.x / 32 - Traits::kFirstDispatchWarp;
    first = ring * call.num_blocks + call.block;
    stride = call.num_blocks * (Traits::kDispatchWarps + Traits::kMathWarps);
    int32_t const most = ceil_div<int32_t>(2 * params.plan.hidden, CombineRing::kBytes);
    split = max_of(1, min_of(most, stride / max_of(params.rows, 1)));
    slots = load_slots(params, call, first / split);
    next = load_slots(params, call, (first + stride) / split);
  }
};

// Math and dispatch warps of all blocks, when all ranks have stored all results. These come by bulk
// copies into the warp's ring, as many as it holds ahead of the sums, across units: loads into
// registers left the memory idle while sums were formed.
__device__ __forceinline__ void combine_tokens(MegaMoeParams const& params, CallState const& call,
                                               MegaMoeShared& shared, CombineUnits const& work) {
  constexpr int kPieces = CombineRing::kPieces;
  constexpr int32_t kBytes = CombineRing::kBytes;
  int const lane = threadIdx.x % 32;
  CombineRing& ring = shared.combine[work.ring];
  MegaMoePlan const& plan = params.plan;
  int32_t const row_bytes = 2 * plan.hidden;
  int64_t const slot_stride = int64_t{1} * plan.max_tokens * row_bytes;
  char const* const rows =
      params.view(params.workspace.rank).combine_row<char>(plan, params.layout, 0, 0);
  if (lane < kPieces) mbarrier_init(&ring.full[lane], 1);
  fence_mbarrier_init_release_cluster();
  // Results, and what lay in the ring before, were accesses of the generic proxy.
  fence_proxy_async();
  __syncwarp();

  int32_t const first = work.first, stride = work.stride, split = work.split;
  int32_t const units = params.rows * split;
  TokenSlots slots = work.slots;
  TokenSlots next = work.next;
  // What is brought next: the slots `left` of the piece at byte `from` of row `token`.
  bool ahead = false;  // of the next unit already
  int32_t token = first / split;
  int32_t from = first % split * kBytes;
  uint32_t left = __ballot_sync(0xffffffffu, first < units && slots.used);
  uint32_t brought = 0, taken = 0;
  for (int32_t unit = first; unit < units; unit += stride) {
    uint32_t const used = __ballot_sync(0xffffffffu, slots.used);
    uint32_t const used_next = __ballot_sync(0xffffffffu, next.used);
    auto const bring = [&] {
      while (brought - taken < kPieces) {
        if (left != 0) {
          if (lane == 0) {
            uint32_t const bytes = min_of(kBytes, row_bytes - from);
            uint64_t* const full = &ring.full[brought % kPieces];
            mbarrier_arrive_expect(full, bytes);
            bulk_load(
                ring.pieces[brought % kPieces],
                rows + (__ffs(left) - 1) * slot_stride + int64_t{1} * token * row_bytes + from,
                bytes, full);
          }
          left &= left - 1;
          ++brought;
        } else if (from + split * kBytes < row_bytes) {
          from += split * kBytes;
          left = ahead ? used_next : used;
        } else if (!ahead && unit + stride < units) {
          ahead = true;
          token = (unit + stride) / split;
          from = (unit + stride) % split * kBytes;
          left = used_next;
        } else {
          return;
        }
      }
    };
    char* const y = reinterpret_cast<char*>(params.y) + int64_t{1} * (unit / split) * row_bytes;
    for (int32_t at = unit % split * kBytes; at < row_bytes; at += split * kBytes) {
      constexpr int kChunks = kBytes / 512;
      float acc[kChunks][8] = {};
      for (uint32_t slot = used; slot != 0; slot &= slot - 1) {
        bring();
        uint64_t* const full = &ring.full[taken % kPieces];
        while (!mbarrier_try_wait(full, taken / kPieces % 2)) {
        }
        char const* const piece = ring.pieces[taken % kPieces] + lane * 16;
        uint4 values[kChunks];
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          values[c] = *reinterpret_cast<uint4 const*>(piece + c * 512);
        }
        __syncwarp();  // all have read it
        ++taken;
        float const weight = __shfl_sync(0xffffffffu, slots.weight, __ffs(slot) - 1);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) add_weighted(acc[c], values[c], weight);
      }
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        int32_t const offset = at + c * 512 + lane * 16;
        if (offset < row_bytes) store_sum(y + offset, acc[c], params.routed_scale);
      }
    }
    slots = next;
    next = load_slots(params, call, (unit + 2 * stride) / split);
    if (!ahead) {
      token = (unit + stride) / split;
      from = (unit + stride) % split * kBytes;
      left = unit + stride < units ? used_next : 0;
    }
    ahead = false;
  }
}

// The math warps, when a call failed: the units of this block become NaN, `split` to a row. No other
// block writes them, and the other warps of this one have passed kCombined.
__device__ __forceinline__ void poison_units(MegaMoeParams const& params, CallState const& call,
                                             int32_t split) {
  constexpr int32_t kBytes = CombineRing::kBytes;
  int32_t const row_bytes = 2 * params.plan.hidden;
  int32_t const warp = threadIdx.x / 32 - 4;
  for (int32_t unit = warp * call.num_blocks + call.block; unit < params.rows * split;
       unit += MegaMoeTraits::kMathWarps * call.num_blocks) {
    char* const y = reinterpret_cast<char*>(params.y) + int64_t{1} * (unit / split) * row_bytes;
    for (int32_t at = unit % split * kBytes; at < row_bytes; at += split * kBytes) {
      poison(y + at, min_of(kBytes, row_bytes - at), threadIdx.x % 32, 32);
    }
  }
}

}  // namespace xstage
