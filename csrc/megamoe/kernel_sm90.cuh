// MegaMoE for sm_90a, bf16: a whole mixture-of-experts layer in one persistent kernel per rank.
//
// Computes  y[t] = scale * sum over s of weight[t, s] * W2[e] (SiLU(Wg[e] x[t]) * (Wu[e] x[t])),
//           e = idx[t, s].
// Sends     counts and routes to the owners of the experts; tokens, which owners pull, a row per
//           choice, or sources push, once per owner; rows of Linear-2 results into the token
//           owners' combine slots while the next tiles are computed (the X-Stage action: reshape;
//           schedule.h decides what stands between bursts).
//
// Roles           warps   registers  file
//   prologue      all     168        dispatch.cuh: count, list, tell owners
//   load          0       104        mainloop.cuh: one thread; TMA
//   schedule      1       104        mainloop.cuh: one thread; tiles, waits for their operands
//   dispatch      2, 3    104        push.cuh: tokens to their owners (warp 3); receive.cuh: rows
//                                    into the x ring; combine.cuh
//   math          4-11    200        dispatch.cuh: segments of x, or push.cuh: first tokens (4-7);
//                                    mainloop.cuh, epilogue_l1.cuh, epilogue_l2.cuh, combine.cuh
//
// Shared memory, bytes
//   stages        4 x 49152  A 128 x 64, B 256 x 64, both swizzled; before, counts of routes;
//                            behind, rings of results for the combine
//   staging       8 x 4224   per math warp: 8 rows of 512 + 16
//   tiles, rows   256 + 512  what the scheduler tells loader and math warps; rows per local expert
//
// Barriers
//   full[4]       1 arrival + 49152 bytes      loader -> math warps
//   empty[4]      16 arrivals (both CTAs)      math warps -> both loaders
//   tile_ready[8] 1 arrival                    scheduler -> loader: the next tile
//   operands_ready[8] 1 arrival                scheduler -> loader: its rows, or activations
//   tile_taken[8] 1 arrival                    loader -> scheduler: prepare another
//   ticket_full[8] 1 arrival + 4 bytes         scheduler of CTA 0 -> scheduler of CTA 1
//   kMathGroup    128 threads                  votes of a math warpgroup, and its segments of x
//   kTilesDone    288 threads (load, math)     all stores of the block are complete
//   kRanksDone    320 threads (dispatch, math) a vote: all ranks' results are here, combine
//   kCombined     320 threads (dispatch, math) the block has written its part of y
//
// Global protocol (layout.h has the regions and why two banks suffice): writer, order -> reader
//   kDispatchSignals  last block of a source, fence.sys, relaxed -> every block, acquire.sys: its
//                 counts and lists are here
//   kStaged       last block of a source, fence.sys, relaxed -> dispatch warps, acquire.sys: a segment
//                 of its tokens is readable
//   kTokenHere    who sends a token, st.release.sys -> dispatch warps, acquire.sys: it is there
//   kTickets, kRowTickets  atomics: the next cluster tile of the sequence; the next rows to copy
//   kArrived      dispatch warps, red.release.gpu -> scheduler, acquire + proxy fence
//   kLinear1Done  math warps, red.release.gpu -> scheduler (operands of Linear-2), acquire + proxy
//                 fence; dispatch warps, acquire (x ring slot free)
//   kLinear2Done  math warps, red.relaxed.gpu, their reads being over -> scheduler (h ring slot)
//   from[rank]    last block of a rank, fence.sys, relaxed -> every block of every rank, combine
// Requires: all CTAs co-resident (cooperative launch); pairs of CTAs in a cluster; plan fields
//           block_m, block_n, cluster_size as in traits_sm90.h (checked in launch.cu).
#pragma once

#include "combine.cuh"
#include "dispatch.cuh"
#include "epilogue_l1.cuh"
#include "epilogue_l2.cuh"
#include "mainloop.cuh"
#include "push.cuh"
#include "receive.cuh"

namespace xstage {

constexpr int kTilesThreads = 32 + 32 * MegaMoeTraits::kMathWarps;
constexpr int kCombineThreads = 32 * (MegaMoeTraits::kDispatchWarps + MegaMoeTraits::kMathWarps);

// What warpgroup `group` does of a tile. From one lane, so that the branches around matrix
// instructions are uniform.
__device__ __forceinline__ WarpgroupWork warpgroup_work(MegaMoePlan const& plan,
                                                        TileWork const& entry, int32_t group) {
  using Traits = MegaMoeTraits;
  WarpgroupWork work;
  work.phase = static_cast<TilePhase>(uniform(static_cast<int32_t>(entry.phase)));
  work.block = uniform(entry.block);
  work.rows = uniform(entry.rows);
  work.n = uniform(entry.n);
  work.ring_row = uniform(entry.ring_row);
  bool const split =
      static_cast<TileShare>(uniform(static_cast<int32_t>(entry.share))) == TileShare::kSplit;
  int32_t const cta = split ? uniform(cute::block_rank_in_cluster()) : 0;
  work.halved = split && group == 1;
  work.half = work.halved ? cta : 0;
  work.count = split ? (group == 1 ? 1 : 2 << cta) : 2;
  if (work.half == 1) {  // of the partner's block
    work.block -= 1;
    work.rows = Traits::kBlockM;
    work.ring_row = (work.ring_row == 0 ? plan.h_ring_blocks * Traits::kBlockM : work.ring_row) -
                    Traits::kBlockM;
  }
  return work;
}

// Math warps: all tiles of this CTA.
template <bool kTrace>
__device__ __forceinline__ void compute_tiles(MegaMoeParams const& params, CallState const& call,
                                              MegaMoeShared& shared) {
  using namespace cute;
  using Traits = MegaMoeTraits;
  auto mma =
      make_tiled_mma(MMA_Atom<SM90_64x256x16_F32BF16BF16_SS<GMMA::Major::K, GMMA::Major::K>>{});
  auto half_mma =
      make_tiled_mma(MMA_Atom<SM90_64x128x16_F32BF16BF16_SS<GMMA::Major::K, GMMA::Major::K>>{});
  Tensor acc = partition_fragment_C(mma, Shape<Int<64>, Int<Traits::kBlockN>>{});  // (MMA,1,1)
  auto const half_layout =
      partition_fragment_C(half_mma, Shape<Int<64>, Int<Traits::kBlockN / 2>>{}).layout();
  Outbox outbox;
  outbox.init(shared.staging[threadIdx.x / 32 - 4]);
  StageReader reader;
  int const group = uniform(threadIdx.x / 128 - 1);
  Tracer<kTrace> tracer({params.trace, params.trace_records}, blockIdx.x,
                        group == 0 ? TraceTrack::kMath0 : TraceTrack::kMath1,
                        threadIdx.x % 128 == 0);
  for (int turn = 0;; ++turn) {
    wait_full<kTrace>(params, shared, reader, outbox);
    int64_t const waited = reader.waited;
    reader.waited = 0;
    uint64_t const start_ns = Tracer<kTrace>::now();
    int64_t const start = Tracer<kTrace>::cycles();
    // The four warps of a matrix instruction leave together.
    reader.alive = warpgroup_all(reader.alive);
    TileWork const& entry = shared.tiles[turn % Traits::kTileQueue];
    int32_t const num_k = uniform(reader.alive ? entry.num_k : 0);
    if (num_k == 0) break;
    WarpgroupWork const work = warpgroup_work(params.plan, entry, group);
    uint32_t const origin = load_origin(params, work);
    if (work.phase == TilePhase::kNone || group * 64 >= work.rows) {
      skip_tile<kTrace>(params, shared, reader, num_k, outbox);
    } else if (work.halved) {
      multiply_tile<kTrace, Traits::kBlockN / 2>(params, shared, reader, num_k,
                                                 work.half * Traits::kBlockN / 2, half_mma,
                                                 make_tensor(acc.data(), half_layout), outbox);
    } else {
      multiply_tile<kTrace, Traits::kBlockN>(params, shared, reader, num_k, 0, mma, acc, outbox);
    }
    int64_t const epilogue = Tracer<kTrace>::cycles();
    if (work.phase == TilePhase::kLinear1) store_linear1(params, call, work, acc, outbox);
    if (work.phase == TilePhase::kLinear2) store_linear2(params, call, work, origin, acc, outbox);
    tracer.add(TraceKind::kTile, trace_tile(work), start_ns, waited, reader.waited,
               Tracer<kTrace>::cycles() - epilogue, Tracer<kTrace>::cycles() - start);
    reader.waited = 0;
  }
  outbox.drain(params);
  bulk_wait<0>();
  fence_proxy_async();
}

// Math and dispatch warps meet: whether the results of all ranks are here, as the first math warp
// saw. The vote travels with the barrier: a flag in shared memory would do, but racecheck reports
// it.
__device__ __forceinline__ bool ranks_done(bool done) {
  return named_barrier_all(static_cast<int>(NamedBarrier::kRanksDone), kCombineThreads, done);
}

// The loader of an aborted call leaves with loads under way, for the partner too: they must not
// land in the shared memory of a block that comes after this one. They read this GPU's memory and
// take microseconds; this waits for many times as long, in both CTAs of the cluster.
__device__ __forceinline__ void await_stray_loads() {
  constexpr uint64_t kEnoughNs = 20000;
  for (uint64_t const start_ns = global_timer_ns(); global_timer_ns() - start_ns < kEnoughNs;) {
    __nanosleep(1000);
  }
}

// The end of a call for the math warps: wait for all ranks, add up.
template <bool kTrace>
__device__ __forceinline__ void finish_tokens(MegaMoeParams const& params, CallState const& call,
                                              MegaMoeShared& shared, uint64_t start_ns,
                                              uint64_t tiles_ns) {
  int const thread = threadIdx.x - 128;
  Tracer<kTrace> tracer({params.trace, params.trace_records}, blockIdx.x, TraceTrack::kPhases,
                        thread == 0);
  uint64_t const tail_ns = Tracer<kTrace>::now();
  CombineUnits const units(params, call);
  bool const arrived =
      thread >= 32 || wait_for_ranks(params.workspace, call.epoch, Phase::kCombineArrival);
  bool const ok = ranks_done(arrived);
  tracer.add(TraceKind::kPrologue, 0, start_ns, 0, 0, tiles_ns - start_ns, 0);
  tracer.add(TraceKind::kTail, 0, tail_ns, 0, 0, 0, 0);
  uint64_t const combine_ns = Tracer<kTrace>::now();
  if (ok) {
    combine_tokens(params, call, shared, units);
    tracer.add(TraceKind::kCombine, 0, combine_ns, 0, 0, 0, 0);
  }
  // Only now nobody else writes this block's units.
  named_barrier_sync(NamedBarrier::kCombined, kCombineThreads);
  if (!ok) {
    poison_units(params, call, units.split);
    await_stray_loads();
  }
}

// How many rows of x are tokens.
__device__ __forceinline__ int32_t tokens_of(MegaMoeParams const& params) {
  if (params.num_tokens == nullptr) return params.rows;
  int64_t const asked = params.num_tokens_is_64 ? *static_cast<int64_t const*>(params.num_tokens)
                                                : *static_cast<int32_t const*>(params.num_tokens);
  return static_cast<int32_t>(max_of<int64_t>(0, min_of<int64_t>(asked, params.rows)));
}

// Warps 2 and 3: rows into the x ring. In a push the last one sends this rank's tokens before.
template <bool kTrace>
__device__ __forceinline__ void dispatch_rows(MegaMoeParams const& params, CallState const& call,
                                              MegaMoeShared& shared) {
  bool const sends = threadIdx.x >= 32 * (MegaMoeTraits::kFirstDispatchWarp + 1);
  if (params.plan.dispatch == kPush && sends) push_tokens(params, call, shared);
  receive_rows<kTrace>(params, call, shared);
}

template <bool kTrace>
__global__ void __cluster_dims__(MegaMoeTraits::kCluster, 1, 1)
    __launch_bounds__(MegaMoeTraits::kThreads, 1)
        megamoe_sm90(__grid_constant__ MegaMoeLaunch const launch) {
  using Traits = MegaMoeTraits;
  extern __shared__ __align__(1024) char memory[];
  MegaMoeShared& shared = *reinterpret_cast<MegaMoeShared*>(memory);
  uint64_t const start_ns = Tracer<kTrace>::now();
  int const num_blocks = launch.ranks[0].plan.num_sms;
  int const virtual_rank = blockIdx.x / num_blocks;
  MegaMoeParams const& params = launch.ranks[virtual_rank];

  if (threadIdx.x == 0) {
    for (int s = 0; s < Traits::kStages; ++s) {
      mbarrier_init(&shared.full[s], 1);
      mbarrier_init(&shared.empty[s], Traits::kMathWarps * Traits::kCluster);
    }
    for (int q = 0; q < Traits::kTileQueue; ++q) {
      mbarrier_init(&shared.ticket_full[q], 1);
      mbarrier_init(&shared.tile_ready[q], 1);
      mbarrier_init(&shared.operands_ready[q], 1);
      mbarrier_init(&shared.tile_taken[q], 1);
    }
    fence_mbarrier_init_release_cluster();
    shared.epoch = call_epoch(params.workspace);
  }
  cute::cluster_arrive();
  cute::cluster_wait();

  CallState const call{shared.epoch, static_cast<int32_t>(shared.epoch & 1), tokens_of(params),
                       static_cast<int32_t>(blockIdx.x) - virtual_rank * num_blocks, num_blocks};
  bool const ok = dispatch_prologue(params, call, shared);
  uint64_t const tiles_ns = Tracer<kTrace>::now();

  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Traits::kDataRegisters));
    if (ok && threadIdx.x == 0) load_tiles(params, shared);
    if (ok && threadIdx.x == 32) schedule_tiles(params, call, shared);
    if (threadIdx.x < 32) {
      __syncwarp();
      named_barrier_sync(NamedBarrier::kTilesDone, kTilesThreads);
      if (threadIdx.x == 0) arrive_and_publish(params.workspace, call.epoch, num_blocks);
    } else if (threadIdx.x >= 32 * Traits::kFirstDispatchWarp) {
      if (ok) dispatch_rows<kTrace>(params, call, shared);
      __syncwarp();
      CombineUnits const units(params, call);
      if (ranks_done(true)) combine_tokens(params, call, shared, units);
      __syncwarp();
      named_barrier_arrive(NamedBarrier::kCombined, kCombineThreads);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Traits::kMathRegisters));
    if (ok && params.plan.world > 1) {
      if (params.plan.dispatch == kPush) push_first_tokens(params, call, shared);
      if (params.plan.dispatch == kPull && num_segments(params.plan) > 1) {
        stage_segments(params, call);
      }
    }
    if (ok) compute_tiles<kTrace>(params, call, shared);
    named_barrier_sync(NamedBarrier::kTilesDone, kTilesThreads);
    finish_tokens<kTrace>(params, call, shared, start_ns, tiles_ns);
  }
  // A CTA stays until its partner no longer multicasts to it or arrives at its barriers.
  __syncwarp();  // the barrier takes whole warps
  cute::cluster_arrive();
  cute::cluster_wait();
}

}  // namespace xstage
