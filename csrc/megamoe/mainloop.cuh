// The tile loop: scheduler and loader (one thread each of warps 1 and 0), and the matrix product of
// the math warps.
//
// Shared memory: the stages, the queue of tiles.
// Barriers: full[s]  1 arrival (own loader) + 48 KiB of loads, own and the partner's multicast
//                    -> the math warps
//           empty[s] 16 arrivals: 8 math warps of both CTAs -> the loaders of both CTAs, since
//                    either may multicast into the stage of the other
//           tile_ready[q], operands_ready[q], tile_taken[q]  1 arrival: scheduler -> loader (what
//                    the tile is; its rows or activations are there), loader -> scheduler
//           ticket_full[q]  1 arrival (CTA 1's scheduler) + 4 bytes from CTA 0's scheduler
// Both CTAs of a cluster walk the same tiles with the same number of steps; a CTA without a tile of
// its own keeps step with empty stages.
// While a tile's rows are not there, the loader brings the weights of its first steps.
// kSplit: warpgroup 1 of both CTAs takes rows 64 to 127 of the first block, each half of the
// columns.
// Global protocol: before a tile's rows are loaded the scheduler acquires kArrived (Linear-1: its
// rows are here), kLinear2Done of the block that used the h ring slot before (Linear-1), or
// kLinear1Done (Linear-2: all columns are here). kArrived counts rows, the others Traits::kTileCount
// per tile.
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

// What must be there of a block before its rows or activations are loaded.
__device__ __forceinline__ bool wait_for_operands(MegaMoeParams const& params,
                                                  CallState const& call, TileWork const& tile,
                                                  int32_t block) {
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
    int32_t const rows = block == tile.block ? tile.rows : plan.block_m;
    ok = reach(Phase::kDispatchRows, counter(MegaMoeCounter::kArrived) + block, rows);
    if (ok && block >= plan.h_ring_blocks) {
      ok = reach(Phase::kLinear2Ready,
                 counter(MegaMoeCounter::kLinear2Done) + block - plan.h_ring_blocks,
                 whole_linear2(plan));
    }
  } else if (tile.phase == TilePhase::kLinear2) {
    ok = reach(Phase::kLinear1Ready, counter(MegaMoeCounter::kLinear1Done) + block,
               whole_linear1(plan));
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

  __device__ __forceinline__ TileLoads(MegaMoeParams const& params, TileWork const& tile) {
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

  // 128 rows of the weight tile: 64 gates and the matching ups, or half of 256 rows. `mask` 0: only
  // into this CTA.
  __device__ __forceinline__ void load_b(MegaMoeShared::Stage& stage, uint64_t* barrier, int k,
                                         int half, uint16_t mask) const {
    using namespace cute;
    cutlass::bfloat16_t* const to = stage.b + half * 128 * MegaMoeTraits::kBlockK;
    uint64_t const hint = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
    int32_t const col = k * MegaMoeTraits::kBlockK;
    if (!linear1) {
      int32_t const row = b_row + half * 128;
      if (mask) {
        SM90_TMA_LOAD_MULTICAST_3D::copy(b, barrier, mask, hint, to, col, row, expert);
      } else {
        SM90_TMA_LOAD_3D::copy(b, barrier, hint, to, col, row, expert);
      }
      return;
    }
    int32_t const row = b_row + half * 64;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      void* const part = to + i * 64 * MegaMoeTraits::kBlockK;
      int32_t const gate_or_up = i ^ up_first;
      if (mask) {
        SM90_TMA_LOAD_MULTICAST_4D::copy(b, barrier, mask, hint, part, col, row, gate_or_up,
                                         expert);
      } else {
        SM90_TMA_LOAD_4D::copy(b, barrier, hint, part, col, row, gate_or_up, expert);
      }
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

  static constexpr uint16_t kBoth = 3;  // CTAs: what they share goes into both

  // This CTA's loads for step k.
  __device__ __forceinline__ void issue_tokens(MegaMoeShared::Stage& stage, uint64_t* barrier,
                                               int k, int cta) const {
    if (share == TileShare::kTokens) {
      load_a(stage, barrier, k, cta, kBoth);
    } else {
      load_a(stage, barrier, k, 0, 0);
      if (share != TileShare::kSplit) {
        load_a(stage, barrier, k, 1, 0);
      } else if (cta == 0) {
        load_a(stage, barrier, k, 1, kBoth);
      }
    }
  }
  __device__ __forceinline__ void issue_weights(MegaMoeShared::Stage& stage, uint64_t* barrier,
                                                int k, int cta) const {
    if (share == TileShare::kWeights || share == TileShare::kSplit) {
      load_b(stage, barrier, k, cta, kBoth);
    } else {
      load_b(stage, barrier, k, 0, 0);
      load_b(stage, barrier, k, 1, 0);
    }
  }
};

// The cluster tile of turn `turn`: by the static deal, or a ticket that CTA 0 draws and tells
// CTA 1. Tickets only grow, so a cluster walks forwards, and every wait of a tile points to tiles
// that others have drawn before. Negative: the call was aborted.
__device__ __forceinline__ int32_t next_tile(MegaMoeParams const& params, CallState const& call,
                                             MegaMoeShared& shared, int32_t turn, int cta) {
  if (!MegaMoeTraits::kTickets) {
    return dealt_tile(params.plan, turn, call.block / MegaMoeTraits::kCluster);
  }
  int32_t const slot = turn % MegaMoeTraits::kTileQueue;
  if (cta == 0) {
    uint32_t* const counter = params.view(params.workspace.rank)
                                  .counter(params.layout, call.bank, MegaMoeCounter::kTickets);
    int32_t const ticket = static_cast<int32_t>(atomicAdd(counter, 1u));
    store_async_cluster(&shared.tickets[slot], ticket, &shared.ticket_full[slot], 1);
    return ticket;
  }
  mbarrier_arrive_expect(&shared.ticket_full[slot], sizeof(int32_t));
  uint32_t const parity = turn / MegaMoeTraits::kTileQueue & 1;
  bool const ok = mbarrier_wait(&shared.ticket_full[slot], parity, params.workspace);
  return ok ? shared.tickets[slot] : -1;
}

// One thread. Works out this cluster's tiles, one ahead of the loader, tells it, and waits for
// their operands.
__device__ __forceinline__ void schedule_tiles(MegaMoeParams const& params, CallState const& call,
                                               MegaMoeShared& shared) {
  using Traits = MegaMoeTraits;
  MegaMoePlan const& plan = params.plan;
  int const cta = static_cast<int>(cute::block_rank_in_cluster());
  TileCursor<uint32_t const*> cursor(plan, shared.rows);
  for (int32_t turn = 0;; ++turn) {
    int32_t const slot = turn % Traits::kTileQueue;
    if (turn > 0) {
      int32_t const before = turn - 1;
      uint32_t const parity = before / Traits::kTileQueue & 1;
      if (!mbarrier_wait(&shared.tile_taken[before % Traits::kTileQueue], parity,
                         params.workspace)) {
        return;
      }
    }
    int32_t const index = next_tile(params, call, shared, turn, cta);
    if (index < 0) return;
    TileWork work{};
    if (cursor.seek(index)) {
      Tile const tile = cursor.tile(cta);
      // CTA 0 always has a tile; a partner without one takes as many steps.
      bool const linear1 = cursor.tile(0).phase == TilePhase::kLinear1;
      work = TileWork{tile.phase,
                      tile.share,
                      (linear1 ? plan.hidden : plan.intermediate) / Traits::kBlockK,
                      tile.block,
                      tile.rows,
                      tile.n,
                      tile.expert,
                      tile.block % plan.h_ring_blocks * Traits::kBlockM};
    }
    shared.tiles[slot] = work;
    mbarrier_arrive(&shared.tile_ready[slot]);
    if (work.num_k == 0) return;
    if (!wait_for_operands(params, call, work, work.block)) return;
    // Warpgroup 1 works on the partner's block.
    if (work.share == TileShare::kSplit && cta == 1 &&
        !wait_for_operands(params, call, work, work.block - 1)) {
      return;
    }
    mbarrier_arrive(&shared.operands_ready[slot]);
  }
}

// One thread. Keeps the stages full.
__device__ __forceinline__ void load_tiles(MegaMoeParams const& params, MegaMoeShared& shared) {
  using Traits = MegaMoeTraits;
  int const cta = static_cast<int>(cute::block_rank_in_cluster());
  PipelineState pipe;
  for (int32_t turn = 0;; ++turn) {
    int32_t const slot = turn % Traits::kTileQueue;
    uint32_t const parity = turn / Traits::kTileQueue & 1;
    if (!mbarrier_wait(&shared.tile_ready[slot], parity, params.workspace)) return;
    TileWork const work = shared.tiles[slot];
    TileLoads const loads(params, work);
    // Takes the stage for a step, and brings weights into it. In an aborted call the math warps
    // release stages that were never filled: one whose last filling is still under way is not taken
    // again.
    auto const begin_step = [&](PipelineState const& at, int k) {
      uint64_t* const full = &shared.full[at.stage];
      if (!mbarrier_wait(&shared.empty[at.stage], at.phase ^ 1, params.workspace)) return false;
      if (!mbarrier_test_wait(full, at.phase ^ 1)) return false;
      if (work.phase != TilePhase::kNone) {
        loads.issue_weights(shared.stages[at.stage], full, k, cta);
      }
      return true;
    };
    if (work.num_k == 0) {  // the math warps find it behind an empty stage
      if (begin_step(pipe, 0)) mbarrier_arrive(&shared.full[pipe.stage]);
      return;
    }
    // Weights need not wait for rows.
    uint64_t* const operands = &shared.operands_ready[slot];
    int32_t begun = 0;
    PipelineState at = pipe;
    while (begun < min_of(work.num_k, Traits::kStages) && !mbarrier_test_wait(operands, parity)) {
      if (!begin_step(at, begun)) return;
      at.advance();
      ++begun;
    }
    if (!mbarrier_wait(operands, parity, params.workspace)) return;
    int32_t const look_ahead = max_of(work.num_k - Traits::kLookAhead, 0);
    for (int k = 0; k < work.num_k; ++k, pipe.advance()) {
      if (k == look_ahead) mbarrier_arrive(&shared.tile_taken[slot]);
      if (k >= begun && !begin_step(pipe, k)) return;
      // Our arrival, and with it the stage, comes behind operands_ready: what the scheduler
      // acquired holds for the math warps too.
      uint64_t* const full = &shared.full[pipe.stage];
      if (work.phase == TilePhase::kNone) {
        mbarrier_arrive(full);
        continue;
      }
      mbarrier_arrive_expect(full, sizeof(MegaMoeShared::Stage));
      loads.issue_tokens(shared.stages[pipe.stage], full, k, cta);
    }
  }
}

// Where a math warp stands in the ring of stages.
struct StageReader {
  PipelineState pipe;
  bool alive = true;   // false: the call was aborted
  int64_t waited = 0;  // cycles, in the trace build
};

// Waits for a filled stage. When the call is aborted `alive` turns false and stages count as
// filled: the math warps then run through, without branches around their matrix instructions.
template <bool kTrace>
__device__ __forceinline__ void wait_full(MegaMoeParams const& params, MegaMoeShared& shared,
                                          StageReader& reader, Outbox& outbox) {
  uint64_t* const full = &shared.full[reader.pipe.stage];
  if (mbarrier_test_wait(full, reader.pipe.phase)) return;
  reader.waited -= Tracer<kTrace>::cycles();
  // Never block while others may wait for what this warp has finished.
  outbox.publish(params);
  for (uint32_t polls = 1; reader.alive && !mbarrier_try_wait(full, reader.pipe.phase); ++polls) {
    if (polls % 64 == 0) reader.alive = !aborted(params.workspace);
  }
  reader.waited += Tracer<kTrace>::cycles();
}

// Tells both loaders of the cluster that this warp has read a stage.
__device__ __forceinline__ void release_stage(MegaMoeShared& shared, int stage) {
  int const lane = threadIdx.x % 32;
  if (lane < MegaMoeTraits::kCluster) mbarrier_arrive_cluster(&shared.empty[stage], lane);
}

// acc = A * B^T over num_k stages; stage 0 is filled already. kColumns of the 256 from
// `first_column` on.
template <bool kTrace, int kColumns, class Mma, class Acc>
__device__ __forceinline__ void multiply_tile(MegaMoeParams const& params, MegaMoeShared& shared,
                                              StageReader& reader, int num_k, int first_column,
                                              Mma mma, Acc&& acc, Outbox& outbox) {
  using namespace cute;
  using Traits = MegaMoeTraits;
  using Element = cutlass::bfloat16_t;
  int const group = threadIdx.x / 128 - 1;
  auto const layout_a =
      tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<64>, Int<Traits::kBlockK>>{});
  auto const layout_b = tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                      Shape<Int<kColumns>, Int<Traits::kBlockK>>{});
  auto thread_mma = mma.get_thread_slice(threadIdx.x % 128);
  int previous = 0;
  mma.accumulate_ = GMMA::ScaleOut::Zero;
  for (int k = 0; k < num_k; ++k, reader.pipe.advance()) {
    if (k > 0) wait_full<kTrace>(params, shared, reader, outbox);
    MegaMoeShared::Stage& stage = shared.stages[reader.pipe.stage];
    Tensor sA = make_tensor(make_smem_ptr(stage.a + group * 64 * Traits::kBlockK),
                            layout_a);  // (WG_M,BLK_K)
    Tensor sB = make_tensor(make_smem_ptr(stage.b + first_column * Traits::kBlockK),
                            layout_b);                  // (BLK_N,BLK_K)
    Tensor tCrA = thread_mma.partition_fragment_A(sA);  // (MMA,MMA_M,MMA_K)
    Tensor tCrB = thread_mma.partition_fragment_B(sB);  // (MMA,MMA_N,MMA_K)
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
    previous = reader.pipe.stage;
    outbox.step(params);
  }
  warpgroup_wait<0>();
  release_stage(shared, previous);
}

// Keeps step with the partner, or with the other warpgroup, where this one has no rows.
template <bool kTrace>
__device__ __forceinline__ void skip_tile(MegaMoeParams const& params, MegaMoeShared& shared,
                                          StageReader& reader, int num_k, Outbox& outbox) {
  for (int k = 0; k < num_k; ++k, reader.pipe.advance()) {
    if (k > 0) wait_full<kTrace>(params, shared, reader, outbox);
    release_stage(shared, reader.pipe.stage);
    outbox.step(params);
  }
}

}  // namespace xstage
