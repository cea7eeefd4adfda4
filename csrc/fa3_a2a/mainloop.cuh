// The two roles that turn Q, K and V into an output tile.
//
//   load_role   one thread: K one block ahead of V, Q per warpgroup
//   MathRole    one warpgroup: 64 query rows. Per key block n:
//                 S = Q K(n)^T  and  O += P(n-1) V(n-1)   issued together, in its turn
//                 softmax of S(n) while P(n-1) V(n-1) still runs
#pragma once

#include "attention/loads.cuh"
#include "attention/masks.cuh"
#include "attention/params.h"
#include "softmax.cuh"
#include "traits_sm90.h"

namespace xstage {

// Keys that at least one row of the tile may see end here.
template <bool kCausal>
__device__ __forceinline__ int32_t tile_key_end(KeySpace const& keys, QueryTile const& tile) {
  return key_end(tile.row + tile.num_rows - 1, keys.num_query_rows, keys.num_keys, kCausal);
}

// A first round that means none; the compiler keeps the main loop in registers only with a way out
// of `next` that comes before any arithmetic.
constexpr int32_t kNoTiles = INT32_MAX;

// The tiles of one block, one of every round of the grid.
struct TileWalk {
  TileSchedule const& schedule;
  int32_t const& num_rounds;
  int32_t block;
  int32_t num_blocks;
  int32_t round;  // of the next tile; 0, or kNoTiles

  __device__ __forceinline__ bool next(QueryTile& tile) {
    if (round == kNoTiles) return false;
    int64_t const index = schedule.dealt(round, num_rounds, block, num_blocks);
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
  // With peers the kernel before grants a slot, which loads do not wait for; alone it may have
  // written what is loaded here.
  if (params.refused == nullptr) wait_for_kernel_before();
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
  using Softmax = OnlineSoftmax<Traits::kBlockN, Traits::kMaximaAtOnce>;
  using FragmentO = decltype(cute::partition_fragment_C(
      typename Traits::MmaPV{}, cute::Shape<cute::Int<kGroupRows>, cute::Int<Traits::kHeadDim>>{}));

  __device__ __forceinline__ MathRole(AttentionParams const& params, Storage& smem, int group,
                                      int thread)
      : params_(params), smem_(smem), group_(group), thread_(thread), turn_{group} {
    turn_.open();
  }
  __device__ __forceinline__ void close() { turn_.close(); }

  // Leaves in `out` the sum of P V, in `softmax` what normalises it. `each_step` is called once per
  // step, while products run. False: the tile sees no key.
  template <class EachStep>
  __device__ __forceinline__ bool run(QueryTile const& tile, FragmentO& out, Softmax& softmax,
                                      EachStep each_step);

 private:
  __device__ __forceinline__ void release(MBarrier& empty) {
    if (thread_ % 32 == 0) empty.arrive();
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
                                       int32_t first_row) const {
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

template <class Traits>
template <class EachStep>
__device__ __forceinline__ bool MathRole<Traits>::run(QueryTile const& tile, FragmentO& out,
                                                      Softmax& softmax, EachStep each_step) {
  using namespace cute;
  KeyCursor<Traits::kBlockN> cursor(params_.keys, tile.batch,
                                    tile_key_end<Traits::kCausal>(params_.keys, tile));
  if (cursor.done()) return false;
  int32_t const first_row = tile.row + group_ * kGroupRows;
  bool const has_segments = params_.keys.segments != nullptr;

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
  // P as operand A: eight consecutive scores are one thread's part of a 16-column step.
  Tensor tOrP = make_tensor<Element>(
      Layout<Shape<Shape<_2, _2, _2>, _1, Int<Traits::kBlockN / 16>>>{});  // ((2,2,2),1,N/16)
  auto take_probabilities = [&](auto begin, auto end) {
    auto words = recast<uint32_t>(tOrP);
#pragma unroll
    for (int i = begin / 2; i < end / 2; ++i) {
      words(i) = pack<Element>(tSrS(2 * i), tSrS(2 * i + 1));
    }
  };
  constexpr Int<0> kBegin;
  constexpr Int<Softmax::kEarly> kLate;
  constexpr Int<Softmax::kSize> kEnd;
  float rescale[2];

  KeyBlockView block = cursor.view();
  smem_.q_full[group_].wait(q_phase_);
  q_phase_ ^= 1;
  smem_.k_full[k_ring_.stage].wait(k_ring_.phase);
  issue_product<true>(mma_qk, tSrQ, tSrK(_, _, _, k_ring_.stage), tSrS);
  warpgroup_wait<0>();
  warpgroup_fence_operand(tSrS);
  release(smem_.k_empty[k_ring_.stage]);
  k_ring_.advance();
  if (__builtin_expect(needs_mask(block, first_row), 0)) mask(tSrS, block, first_row);
  softmax.step(tSrS, rescale, [] {});
  take_probabilities(kBegin, kEnd);
  clear(out);

  int32_t v_valid = block.num_valid;
  cursor.advance();
  if (!cursor.done()) smem_.k_full[k_ring_.stage].wait(k_ring_.phase);
  while (!cursor.done()) {
    block = cursor.view();
    turn_.take();
    issue_product<true>(mma_qk, tSrQ, tSrK(_, _, _, k_ring_.stage), tSrS);
    smem_.v_full[v_ring_.stage].wait(v_ring_.phase);
    if (__builtin_expect(has_segments && v_valid < Traits::kBlockN, 0))
      clear_hidden_values(v_ring_.stage, v_valid);
    issue_product<false>(mma_pv, tOrP, tOrV(_, _, _, v_ring_.stage), out);
    turn_.pass();
    each_step();
    warpgroup_wait<1>();
    warpgroup_fence_operand(tSrS);
    release(smem_.k_empty[k_ring_.stage]);
    k_ring_.advance();
    if (__builtin_expect(needs_mask(block, first_row), 0)) mask(tSrS, block, first_row);
    // P V of the block before has ended by now, so its registers can take the probabilities that are
    // final, beside the last exponentials. The wait stands behind the softmax's branches: in a
    // straight line the compiler moves it in front of the softmax, and nothing overlaps.
    bool const must_rescale = softmax.step(tSrS, rescale, [&] {
      warpgroup_wait<0>();
      warpgroup_fence_operand(out);
      release(smem_.v_empty[v_ring_.stage]);
      v_ring_.advance();
      take_probabilities(kBegin, kLate);
    });
    take_probabilities(kLate, kEnd);
    v_valid = block.num_valid;
    cursor.advance();
    if (!cursor.done()) smem_.k_full[k_ring_.stage].wait(k_ring_.phase);
    if (__builtin_expect(must_rescale, 0)) {
#pragma unroll
      for (int e = 0; e < size(out); ++e) out(e) *= rescale[e / 2 % 2];
    }
  }

  release(smem_.q_empty[group_]);
  smem_.v_full[v_ring_.stage].wait(v_ring_.phase);
  if (__builtin_expect(has_segments && v_valid < Traits::kBlockN, 0))
    clear_hidden_values(v_ring_.stage, v_valid);
  issue_product<false>(mma_pv, tOrP, tOrV(_, _, _, v_ring_.stage), out);
  warpgroup_wait<0>();
  warpgroup_fence_operand(out);
  release(smem_.v_empty[v_ring_.stage]);
  v_ring_.advance();
  return true;
}

}  // namespace xstage
