// The tile loop: the loader (one thread of warp 0) and the matrix product of the math warps.
//
// Shared memory: the stages, the queue of tiles.
// Barriers: full[s]  1 arrival (own loader) + 48 KiB of loads, own and the partner's multicast
//                    -> the math warps
//           empty[s] 16 arrivals: 8 math warps of both CTAs -> the loaders of both CTAs, since
//                    either may multicast into the stage of the other
// Both CTAs of a cluster walk the same tiles with the same number of steps; a CTA without a tile of
// its own keeps step with empty stages.
// Global protocol: before a tile's loads the loader acquires kArrived (Linear-1: its rows are
// here), kLinear2Done of the block that used the h ring slot before (Linear-1), or kLinear1Done
// (Linear-2: all columns are here). Counters of tiles count math warps, 8 per tile.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "outbox.cuh"
#include "params.h"
#include "pipeline.cuh"
#include "trace.cuh"

namespace xstage {

// What the loader waits for before the loads of a tile.
__device__ __forceinline__ bool wait_for_operands(MegaMoeParams const& params,
                                                  CallState const& call, Tile const& tile) {
  MegaMoePlan const& plan = params.plan;
  MegaMoeView const own = params.view(params.workspace.rank);
  auto const counter = [&](MegaMoeCounter which) {
    return own.counter(params.layout, call.bank, which);
  };
  auto const reach = [&](Phase phase, uint32_t const* word, int32_t target) {
    WaitSite const site{phase, -1, call.epoch, static_cast<uint64_t>(target)};
    return wait_until(params.workspace, site, [&]() -> uint64_t { return ld_acquire_gpu(word); });
  };
  bool ok = true;
  if (tile.phase == TilePhase::kLinear1) {
    ok = reach(Phase::kDispatchRows, counter(MegaMoeCounter::kArrived) + tile.block, tile.rows);
    if (ok && tile.block >= plan.h_ring_blocks) {
      ok = reach(Phase::kLinear2Ready,
                 counter(MegaMoeCounter::kLinear2Done) + tile.block - plan.h_ring_blocks,
                 plan.linear2_tiles() * MegaMoeTraits::kMathWarps);
    }
  } else if (tile.phase == TilePhase::kLinear2) {
    ok = reach(Phase::kLinear1Ready, counter(MegaMoeCounter::kLinear1Done) + tile.block,
               plan.linear1_tiles() * MegaMoeTraits::kMathWarps);
  }
  // Rows and activations were written by other SMs; TMA reads them next.
  fence_proxy_async();
  return ok;
}

// Where the loads of a tile come from.
struct TileLoads {
  CUtensorMap const* a;
  CUtensorMap const* b;
  int32_t a_row;
  int32_t b_row;
  int32_t expert;
  int32_t up_first;  // Linear-1: 1 when the ups come before the gates in w13
  bool linear1;
  TileShare share;

  __device__ __forceinline__ TileLoads(MegaMoeParams const& params, Tile const& tile) {
    using Traits = MegaMoeTraits;
    MegaMoePlan const& plan = params.plan;
    linear1 = tile.phase == TilePhase::kLinear1;
    share = tile.share;
    expert = tile.expert;
    a = linear1 ? &params.x_ring : &params.h_ring;
    b = linear1 ? &params.w13 : &params.w2;
    a_row = tile.block % (linear1 ? plan.x_ring_blocks : plan.h_ring_blocks) * Traits::kBlockM;
    b_row = tile.n * (linear1 ? Traits::kBlockN / 2 : Traits::kBlockN);
    up_first = plan.weight_layout == kUpGate ? 1 : 0;
  }

  // 128 rows of the weight tile: gates or ups, or half of 256 rows. `mask` 0: only into this CTA.
  __device__ __forceinline__ void load_b(MegaMoeShared::Stage& stage, uint64_t* barrier, int k,
                                         int half, uint16_t mask) const {
    using namespace cute;
    void* const to = stage.b + half * 128 * MegaMoeTraits::kBlockK;
    uint64_t const hint = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
    int32_t const col = k * MegaMoeTraits::kBlockK;
    int32_t const gate_or_up = half ^ up_first;
    if (linear1 && mask) {
      SM90_TMA_LOAD_MULTICAST_4D::copy(b, barrier, mask, hint, to, col, b_row, gate_or_up, expert);
    } else if (linear1) {
      SM90_TMA_LOAD_4D::copy(b, barrier, hint, to, col, b_row, gate_or_up, expert);
    } else if (mask) {
      SM90_TMA_LOAD_MULTICAST_3D::copy(b, barrier, mask, hint, to, col, b_row + half * 128, expert);
    } else {
      SM90_TMA_LOAD_3D::copy(b, barrier, hint, to, col, b_row + half * 128, expert);
    }
  }
  // 64 rows of the token tile.
  __device__ __forceinline__ void load_a(MegaMoeShared::Stage& stage, uint64_t* barrier, int k,
                                         int half, uint16_t mask) const {
    using namespace cute;
    void* const to = stage.a + half * 64 * MegaMoeTraits::kBlockK;
    uint64_t const hint = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
    int32_t const col = k * MegaMoeTraits::kBlockK;
    if (mask) {
      SM90_TMA_LOAD_MULTICAST_2D::copy(a, barrier, mask, hint, to, col, a_row + half * 64);
    } else {
      SM90_TMA_LOAD_2D::copy(a, barrier, hint, to, col, a_row + half * 64);
    }
  }

  // All loads of this CTA for step k.
  __device__ __forceinline__ void issue(MegaMoeShared::Stage& stage, uint64_t* barrier, int k,
                                        int cta) const {
    constexpr uint16_t kBoth = 3;
    if (share == TileShare::kTokens) {
      load_a(stage, barrier, k, cta, kBoth);
    } else {
      load_a(stage, barrier, k, 0, 0);
      load_a(stage, barrier, k, 1, 0);
    }
    if (share == TileShare::kWeights) {
      load_b(stage, barrier, k, cta, kBoth);
    } else {
      load_b(stage, barrier, k, 0, 0);
      load_b(stage, barrier, k, 1, 0);
    }
  }
};

// One thread. Walks this cluster's tiles, waits for their operands, keeps the stages full.
__device__ __forceinline__ void load_tiles(MegaMoeParams const& params, CallState const& call,
                                           MegaMoeShared& shared) {
  using Traits = MegaMoeTraits;
  MegaMoePlan const& plan = params.plan;
  int const cta = static_cast<int>(cute::block_rank_in_cluster());
  TileCursor<uint32_t const*> cursor(plan, shared.rows);
  PipelineState pipe;
  int32_t const worker = call.block / Traits::kCluster;
  for (int32_t turn = 0;; ++turn) {
    bool const more = cursor.seek(dealt_tile(plan, turn, worker));
    TileWork work{};
    Tile tile{};
    if (more) {
      tile = cursor.tile(cta);
      // CTA 0 always has a tile; a partner without one takes as many steps.
      bool const linear1 = cursor.tile(0).phase == TilePhase::kLinear1;
      work = TileWork{tile.phase,
                      (linear1 ? plan.hidden : plan.intermediate) / Traits::kBlockK,
                      tile.block,
                      tile.rows,
                      tile.n,
                      tile.expert,
                      tile.block % plan.h_ring_blocks * Traits::kBlockM,
                      0};
      if (!wait_for_operands(params, call, tile)) return;
    }
    TileLoads const loads(params, tile);
    for (int k = 0; k < max_of(work.num_k, 1); ++k, pipe.advance()) {
      uint64_t* const full = &shared.full[pipe.stage];
      if (!mbarrier_wait(&shared.empty[pipe.stage], pipe.phase ^ 1, params.workspace)) return;
      if (k == 0) shared.tiles[turn % Traits::kTileQueue] = work;
      if (tile.phase == TilePhase::kNone) {
        mbarrier_arrive(full);
      } else {
        mbarrier_arrive_expect(full, sizeof(MegaMoeShared::Stage));
        loads.issue(shared.stages[pipe.stage], full, k, cta);
      }
    }
    if (!more) return;
  }
}

// Waits for a filled stage. When the call is aborted `alive` turns false and stages count as
// filled: the math warps then run through, without branches around their matrix instructions.
template <bool kTrace>
__device__ __forceinline__ void wait_full(MegaMoeParams const& params, MegaMoeShared& shared,
                                          PipelineState const& pipe, Outbox& outbox, bool& alive,
                                          int64_t& waited) {
  if (mbarrier_test_wait(&shared.full[pipe.stage], pipe.phase)) return;
  waited -= Tracer<kTrace>::cycles();
  // Never block while others may wait for what this warp has finished.
  outbox.publish();
  for (uint32_t polls = 1; alive && !mbarrier_try_wait(&shared.full[pipe.stage], pipe.phase);
       ++polls) {
    if (polls % 64 == 0) alive = !aborted(params.workspace);
  }
  waited += Tracer<kTrace>::cycles();
}

// Tells both loaders of the cluster that this warp has read a stage.
__device__ __forceinline__ void release_stage(MegaMoeShared& shared, int stage) {
  int const lane = threadIdx.x % 32;
  if (lane < MegaMoeTraits::kCluster) mbarrier_arrive_cluster(&shared.empty[stage], lane);
}

// acc = A * B^T over num_k stages; stage 0 is filled already.
template <bool kTrace, class Mma, class Acc>
__device__ __forceinline__ void multiply_tile(MegaMoeParams const& params, MegaMoeShared& shared,
                                              PipelineState& pipe, int num_k, Mma& mma, Acc& acc,
                                              Outbox& outbox, bool& alive, int64_t& waited) {
  using namespace cute;
  using Traits = MegaMoeTraits;
  using Element = cutlass::bfloat16_t;
  int const group = threadIdx.x / 128 - 1;
  auto const layout_a =
      tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<64>, Int<Traits::kBlockK>>{});
  auto const layout_b = tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                      Shape<Int<Traits::kBlockN>, Int<Traits::kBlockK>>{});
  auto thread_mma = mma.get_thread_slice(threadIdx.x % 128);
  int previous = 0;
  mma.accumulate_ = GMMA::ScaleOut::Zero;
  for (int k = 0; k < num_k; ++k, pipe.advance()) {
    if (k > 0) wait_full<kTrace>(params, shared, pipe, outbox, alive, waited);
    MegaMoeShared::Stage& stage = shared.stages[pipe.stage];
    Tensor sA = make_tensor(make_smem_ptr(stage.a + group * 64 * Traits::kBlockK),
                            layout_a);                          // (WG_M,BLK_K)
    Tensor sB = make_tensor(make_smem_ptr(stage.b), layout_b);  // (BLK_N,BLK_K)
    Tensor tCrA = thread_mma.partition_fragment_A(sA);          // (MMA,MMA_M,MMA_K)
    Tensor tCrB = thread_mma.partition_fragment_B(sB);          // (MMA,MMA_N,MMA_K)
    warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < size<2>(tCrA); ++i) {
      cute::gemm(mma, tCrA(_, _, i), tCrB(_, _, i), acc);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
    warpgroup_wait<1>();
    // The stage before this one has been read.
    if (k > 0) release_stage(shared, previous);
    previous = pipe.stage;
    outbox.step(params.plan);
  }
  warpgroup_wait<0>();
  release_stage(shared, previous);
}

// Keeps step with the partner, or with the other warpgroup, where this one has no rows.
template <bool kTrace>
__device__ __forceinline__ void skip_tile(MegaMoeParams const& params, MegaMoeShared& shared,
                                          PipelineState& pipe, int num_k, Outbox& outbox,
                                          bool& alive, int64_t& waited) {
  for (int k = 0; k < num_k; ++k, pipe.advance()) {
    if (k > 0) wait_full<kTrace>(params, shared, pipe, outbox, alive, waited);
    release_stage(shared, pipe.stage);
    outbox.step(params.plan);
  }
}

}  // namespace xstage
