// The two roles that turn Q, K and V into an output tile.
//
//   load_role   one thread: K one block ahead of V, Q per warpgroup
//   MathRole    one warpgroup: 64 query rows. Per key block n, over all tiles:
//                 S = Q K(n)^T  and  O += P(n-1) V(n-1)   issued together, in its turn
//                 softmax of S(n) while P(n-1) V(n-1) still runs
#pragma once

#include "attention/loads.cuh"
#include "attention/masks.cuh"
#include "attention/params.h"
#include "epilogue_a2a.cuh"
#include "softmax.cuh"
#include "traits_sm90.h"

namespace xstage {

// Keys that at least one row of the tile may see end here.
template <bool kCausal>
__device__ __forceinline__ int32_t tile_key_end(KeySpace const& keys, QueryTile const& tile) {
  return key_end(tile.row + tile.num_rows - 1, keys.num_query_rows, keys.num_keys, kCausal);
}

// The tiles of one block: round-robin. Where tiles come in falling order of work, every second
// round runs backwards, so that who got the longest gets the shortest next.
// A first round that means none; the compiler keeps the main loop in registers only with a way out
// of `next` that comes before any arithmetic.
constexpr int32_t kNoTiles = INT32_MAX;

struct TileWalk {
  TileSchedule const& schedule;
  int32_t block;
  int32_t num_blocks;
  int32_t round;  // of the next tile; kNoTiles: there is none

  __device__ __forceinline__ bool next(QueryTile& tile) {
    if (round == kNoTiles) return false;
    bool const backwards = schedule.order == TileOrder::kLongestFirst && round % 2 == 1;
    int64_t const index =
        static_cast<int64_t>(round) * num_blocks + (backwards ? num_blocks - 1 - block : block);
    ++round;
    if (index >= schedule.size()) return false;
    tile = schedule.tile(index);
    return true;
  }
};

template <class Traits>
__device__ __forceinline__ void load_role(AttentionParams const& params,
                                          Fa3SharedStorage<Traits>& smem, TileWalk walk) {
  RingState<Traits::kStages> k_ring, v_ring;
  uint32_t q_phase = 0;
  QueryTile tile;
  while (walk.next(tile)) {
    KeyCursor<Traits::kBlockN> cursor(params.keys, tile.batch,
                                      tile_key_end<Traits::kCausal>(params.keys, tile));
    if (cursor.done()) continue;
    int32_t const kv_head = (tile.head + params.head_phase) / params.kv_group;
    auto load_k = [&](int32_t row) {
      smem.k_empty[k_ring.stage].wait(k_ring.phase ^ 1);
      load_tile<Traits::kBlockN, Traits::kHeadDim>(params.k, smem.k_full[k_ring.stage],
                                                   smem.k[k_ring.stage], {row, kv_head, tile.batch},
                                                   Reuse::kMany);
      k_ring.advance();
    };
    auto load_v = [&](int32_t row) {
      smem.v_empty[v_ring.stage].wait(v_ring.phase ^ 1);
      load_tile<Traits::kBlockN, Traits::kHeadDim>(params.v, smem.v_full[v_ring.stage],
                                                   smem.v[v_ring.stage], {row, kv_head, tile.batch},
                                                   Reuse::kMany);
      v_ring.advance();
    };
    int32_t v_row = cursor.view().begin;
    load_k(v_row);
    for (int group = 0; group < Traits::kMathGroups; ++group) {
      smem.q_empty[group].wait(q_phase ^ 1);
      load_tile<kGroupRows, Traits::kHeadDim>(
          params.q, smem.q_full[group], smem.q[group],
          {tile.row + group * kGroupRows, tile.head, tile.batch}, Reuse::kOnce);
    }
    q_phase ^= 1;
    for (cursor.advance(); !cursor.done(); cursor.advance()) {
      int32_t const k_row = cursor.view().begin;
      load_k(k_row);
      load_v(v_row);
      v_row = k_row;
    }
    load_v(v_row);
  }
}

// Issues acc (+)= A B as one group of wgmma; nothing is waited for.
template <bool kClear, class Mma, class TensorA, class TensorB, class TensorC>
__device__ __forceinline__ void issue_product(Mma& mma, TensorA& a, TensorB const& b,
                                              TensorC& acc) {
  constexpr bool kFromRegisters =
      !cute::is_base_of<cute::GMMA::DescriptorIterator, typename Mma::FrgTypeA>::value;
  if constexpr (kFromRegisters) cute::warpgroup_fence_operand(a);
  cute::warpgroup_fence_operand(acc);
  cute::warpgroup_arrive();
  mma.accumulate_ = kClear ? cute::GMMA::ScaleOut::Zero : cute::GMMA::ScaleOut::One;
#pragma unroll
  for (int k = 0; k < decltype(cute::size<2>(a))::value; ++k) {
    cute::gemm(mma, a(cute::_, cute::_, k), b(cute::_, cute::_, k), acc);
    mma.accumulate_ = cute::GMMA::ScaleOut::One;
  }
  cute::warpgroup_commit_batch();
  cute::warpgroup_fence_operand(acc);
  if constexpr (kFromRegisters) cute::warpgroup_fence_operand(a);
}

template <class Traits>
class MathRole {
 public:
  using Element = typename Traits::Element;
  using Storage = Fa3SharedStorage<Traits>;
  using Softmax = OnlineSoftmax<Traits::kBlockN>;
  using Cursor = KeyCursor<Traits::kBlockN>;

  __device__ __forceinline__ MathRole(AttentionParams const& params, Storage& smem, int group,
                                      int thread)
      : params_(params), smem_(smem), group_(group), thread_(thread), turn_{group} {}

  // All tiles of this block: their outputs go to the epilogue.
  __device__ __forceinline__ void run(TileWalk walk, Epilogue<Traits>& epilogue);

 private:
  __device__ __forceinline__ void release(MBarrier& empty) {
    if (thread_ % 32 == 0) empty.arrive();
  }
  __device__ __forceinline__ Cursor keys_of(QueryTile const& tile) const {
    return Cursor(params_.keys, tile.batch, tile_key_end<Traits::kCausal>(params_.keys, tile));
  }
  // The next keys, and the queries of a tile that begins with them.
  __device__ __forceinline__ void wait_for_scores(bool begins) {
    if (begins) {
      smem_.q_full[group_].wait(q_phase_);
      q_phase_ ^= 1;
    }
    smem_.k_full[k_ring_.stage].wait(k_ring_.phase);
  }
  // Scores are in registers: their keys are free, and after a tile's last block its queries.
  __device__ __forceinline__ void release_scores(bool ends) {
    release(smem_.k_empty[k_ring_.stage]);
    k_ring_.advance();
    if (ends) release(smem_.q_empty[group_]);
  }
  __device__ __forceinline__ void wait_for_values(int num_valid) {
    smem_.v_full[v_ring_.stage].wait(v_ring_.phase);
    bool const hidden = params_.keys.segments != nullptr && num_valid < Traits::kBlockN;
    if (__builtin_expect(hidden, 0)) clear_hidden_values(v_ring_.stage, num_valid);
  }
  __device__ __forceinline__ void release_values() {
    release(smem_.v_empty[v_ring_.stage]);
    v_ring_.advance();
  }
  __device__ __forceinline__ void clear_hidden_values(uint32_t stage, int num_valid) {
    clear_rows<Traits::kBlockN, Traits::kHeadDim>(smem_.v[stage], num_valid, thread_);
    cutlass::arch::NamedBarrier::sync(kWarpgroup, kStagedBarrier + group_);
  }
  // True when some row of this warpgroup may not see some key of the block.
  __device__ __forceinline__ bool needs_mask(KeyBlockView const& block, int32_t first_row) const {
    if (block.num_valid < Traits::kBlockN) return true;
    return Traits::kCausal && block.begin + Traits::kBlockN > causal_end(first_row);
  }
  __device__ __forceinline__ int32_t causal_end(int32_t row) const {
    return row + params_.keys.num_keys - params_.keys.num_query_rows + 1;
  }
  template <class Scores>
  __device__ __forceinline__ void mask(Scores& scores, KeyBlockView const& block,
                                       QueryTile const& tile) const {
    int32_t const first_row = tile.row + group_ * kGroupRows;
    if (__builtin_expect(!needs_mask(block, first_row), 1)) return;
    int const row = first_row + fragment_row(thread_);
    int limit[2] = {block.num_valid, block.num_valid};
    if constexpr (Traits::kCausal) {
      limit[0] = min_of(limit[0], causal_end(row) - block.begin);
      limit[1] = min_of(limit[1], causal_end(row + 8) - block.begin);
    }
    hide_columns(scores, thread_, limit);
  }

  AttentionParams const& params_;
  Storage& smem_;
  int group_;   // of the math warpgroups
  int thread_;  // in the warpgroup
  Turn<Traits::kMathGroups, kTurnBarrier> turn_;
  RingState<Traits::kStages> k_ring_, v_ring_;
  uint32_t q_phase_ = 0;
};

// One loop over the key blocks of all tiles. Where a tile ends and the next begins, the first
// product Q K of the new tile and the last P V of the old one are issued together like any other
// pair, so that a tile's end costs the epilogue and no idle tensor core.
template <class Traits>
__device__ __forceinline__ void MathRole<Traits>::run(TileWalk walk, Epilogue<Traits>& epilogue) {
  using namespace cute;
  typename Traits::MmaQK mma_qk;
  typename Traits::MmaPV mma_pv;
  auto thread_qk = mma_qk.get_slice(0);
  auto thread_pv = mma_pv.get_slice(0);
  Tensor sQ = make_tensor(make_smem_ptr(smem_.q[group_]), typename Traits::LayoutQ{});  // (64,D)
  Tensor sK = make_tensor(make_smem_ptr(smem_.k[0]), typename Traits::LayoutK{});    // (N,D,PIPE)
  Tensor sVt = make_tensor(make_smem_ptr(smem_.v[0]), typename Traits::LayoutVt{});  // (D,N,PIPE)
  Tensor tSrQ = thread_qk.partition_fragment_A(sQ);   // (MMA,1,MMA_D)
  Tensor tSrK = thread_qk.partition_fragment_B(sK);   // (MMA,1,MMA_D,PIPE)
  Tensor tOrV = thread_pv.partition_fragment_B(sVt);  // (MMA,1,MMA_N,PIPE)
  Tensor tSrS = partition_fragment_C(
      mma_qk, Shape<Int<kGroupRows>, Int<Traits::kBlockN>>{});  // ((2,2,N/8),1,1)
  Tensor tOrO = partition_fragment_C(
      mma_pv, Shape<Int<kGroupRows>, Int<Traits::kHeadDim>>{});  // ((2,2,D/8),1,1)
  // P as operand A: eight consecutive scores are one thread's part of a 16-column step.
  Tensor tOrP = make_tensor<Element>(
      Layout<Shape<Shape<_2, _2, _2>, _1, Int<Traits::kBlockN / 16>>>{});  // ((2,2,2),1,N/16)
  auto take_probabilities = [&] {
    Tensor words = recast<uint32_t>(tOrP);
#pragma unroll
    for (int i = 0; i < size(words); ++i) words(i) = pack<Element>(tSrS(2 * i), tSrS(2 * i + 1));
  };

  QueryTile tile, following, finished;  // in work; the one after it; whose output is in tOrO
  Cursor cursor(params_.keys, 0, 0);
  // The next tile that sees a key. One that sees none is all zeros.
  auto next_tile = [&](QueryTile& next) {
    while (walk.next(next)) {
      cursor = keys_of(next);
      if (!cursor.done()) return true;
      epilogue.store_empty(next);
    }
    return false;
  };
  if (!next_tile(tile)) return;
  turn_.open();
  Softmax softmax(params_.scale_log2, params_.score_slack);
  float rescale[2];
  auto finish = [&] {
    float inverse[2], lse[2];
    softmax.finish(inverse, lse);
    epilogue.remember(inverse);
    epilogue.store_lse(tile, lse);
  };
  KeyBlockView block = cursor.view();
  cursor.advance();
  bool ends = cursor.done();  // the block in work is the last of its tile
  wait_for_scores(true);
  issue_product<true>(mma_qk, tSrQ, tSrK(_, _, _, k_ring_.stage), tSrS);
  warpgroup_wait<0>();
  warpgroup_fence_operand(tSrS);
  release_scores(ends);
  mask(tSrS, block, tile);
  softmax.step(tSrS, rescale);
  clear(tOrO);
  bool more = !ends || next_tile(following);
  if (more) wait_for_scores(ends);
  take_probabilities();

  while (more) {
    bool const begins = ends;  // the block in work is the first of its tile
    if (begins) {
      finish();
      softmax = Softmax(params_.scale_log2, params_.score_slack);
      finished = tile;
      tile = following;
    }
    int32_t const values_valid = block.num_valid;
    block = cursor.view();
    cursor.advance();
    ends = cursor.done();
    turn_.take();
    issue_product<true>(mma_qk, tSrQ, tSrK(_, _, _, k_ring_.stage), tSrS);
    wait_for_values(values_valid);
    issue_product<false>(mma_pv, tOrP, tOrV(_, _, _, v_ring_.stage), tOrO);
    turn_.pass();
    epilogue.each_step();
    warpgroup_wait<1>();
    warpgroup_fence_operand(tSrS);
    release_scores(ends);
    mask(tSrS, block, tile);
    bool const must_rescale = softmax.step(tSrS, rescale);
    // The wait for the next keys stands here because it branches: in a straight line the compiler
    // moves the wait for the products in front of the softmax, and nothing overlaps.
    more = !ends || next_tile(following);
    if (more) wait_for_scores(ends);
    warpgroup_wait<0>();
    warpgroup_fence_operand(tOrO);
    release_values();
    take_probabilities();
    if (__builtin_expect(begins, 0)) {
      epilogue.store(finished, tOrO);
      clear(tOrO);
    } else if (__builtin_expect(must_rescale, 0)) {
#pragma unroll
      for (int e = 0; e < size(tOrO); ++e) tOrO(e) *= rescale[e / 2 % 2];
    }
  }

  finish();
  wait_for_values(block.num_valid);
  issue_product<false>(mma_pv, tOrP, tOrV(_, _, _, v_ring_.stage), tOrO);
  warpgroup_wait<0>();
  warpgroup_fence_operand(tOrO);
  release_values();
  epilogue.store(tile, tOrO);
  turn_.close();
}

}  // namespace xstage
