// One compiled instance of the attention kernel: types, tiles, shared memory, registers.
#pragma once

#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include "attention/barriers.cuh"
#include "attention/output_store.cuh"
#include "attention/wgmma_n160.cuh"

namespace xstage {

// Named barriers of the kernel; CUTLASS reserves the ones below its first user barrier.
enum Fa3Barrier : int { kTurnBarrier = 0, kStagedBarrier = 3, kDoneBarrier = 6 };

// Selects the product of 64 query rows and N keys.
template <class Element, int kHeadDim, int kN>
struct ScoreAtom {
  using Tile = cute::Shape<cute::Int<kGroupRows>, cute::Int<kN>, cute::Int<kHeadDim>>;
  using type = decltype(cute::GMMA::ss_op_selector<Element, Element, float, Tile>());
};
template <class Element, int kHeadDim>
struct ScoreAtom<Element, kHeadDim, 160> {
  using type = WgmmaN160<Element>;
};

template <class Element_, int kHeadDim_, int kBlockM_, int kBlockN_, bool kCausal_>
struct Fa3Traits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr bool kCausal = kCausal_;
  static constexpr int kStages = 2;

  static constexpr int kMathGroups = kBlockM / kGroupRows;
  static constexpr int kThreads = kWarpgroup * (1 + kMathGroups);
  // Registers after setmaxnreg; the sum over all threads must fit the register file.
  static constexpr int kLoadRegisters = kMathGroups == 2 ? 24 : 32;
  static constexpr int kMathRegisters = kMathGroups == 2 ? 240 : 160;
  // Softmax of a whole block at once (softmax.cuh): three warpgroups hide each other's latencies.
  static constexpr bool kMaximaAtOnce = kMathGroups == 3;
  static_assert(kWarpgroup * (kLoadRegisters + kMathGroups * kMathRegisters) <= 65536);
  static_assert(kBlockM % kGroupRows == 0 && kHeadDim % kPanelCols == 0 && kBlockN % 16 == 0);

  // One warpgroup: 64 rows.
  using TilePV = cute::Shape<cute::Int<kGroupRows>, cute::Int<kHeadDim>, cute::Int<kBlockN>>;
  using MmaQK =
      decltype(cute::make_tiled_mma(typename ScoreAtom<Element, kHeadDim, kBlockN>::type{}));
  using MmaPV = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, TilePV, cute::GMMA::Major::K,
                                 cute::GMMA::Major::MN>()));

  using AtomK = cute::GMMA::Layout_K_SW128_Atom<Element>;
  using AtomMN = cute::GMMA::Layout_MN_SW128_Atom<Element>;
  using LayoutQ = decltype(cute::tile_to_shape(
      AtomK{}, cute::Shape<cute::Int<kGroupRows>, cute::Int<kHeadDim>>{}));  // (64,D)
  using LayoutK = decltype(cute::tile_to_shape(
      AtomK{},
      cute::Shape<cute::Int<kBlockN>, cute::Int<kHeadDim>, cute::Int<kStages>>{}));  // (N,D,PIPE)
  // V as wgmma reads it: transposed, panels of 64 columns one behind the other.
  using LayoutVt = decltype(cute::tile_to_shape(
      AtomMN{}, cute::Shape<cute::Int<kHeadDim>, cute::Int<kBlockN>, cute::Int<kStages>>{},
      cute::Step<cute::_2, cute::_1, cute::_3>{}));  // (D,N,PIPE)
};

template <class Traits>
struct Fa3SharedStorage {
  using Element = typename Traits::Element;
  alignas(1024) Element q[Traits::kMathGroups][kGroupRows * Traits::kHeadDim];
  alignas(1024) Element k[Traits::kStages][Traits::kBlockN * Traits::kHeadDim];
  alignas(1024) Element v[Traits::kStages][Traits::kBlockN * Traits::kHeadDim];
  // The output has a place of its own: a slow remote store then holds up neither Q nor V.
  alignas(1024) Element o[Traits::kMathGroups][kGroupRows * Traits::kHeadDim];
  alignas(16) MBarrier q_full[Traits::kMathGroups];
  MBarrier q_empty[Traits::kMathGroups];
  MBarrier k_full[Traits::kStages];
  MBarrier k_empty[Traits::kStages];
  MBarrier v_full[Traits::kStages];
  MBarrier v_empty[Traits::kStages];
  PendingStore pending[Traits::kMathGroups];
};

}  // namespace xstage
