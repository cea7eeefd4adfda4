// The pull (plan.dispatch = 0): rows that sources have listed for this rank, from their memory, or
// from x, into this rank's x ring, one by one.
//
// Roles: warps 2 and 3, beside the tiles.
// Global protocol:
//   kStaged[source][segment]  acquire.sys: the source's tokens can be read
//   kLinear1Done              acquire: the x ring slot is free
//   kArrived[b]               red.release.gpu per pulled row -> acquire by the schedulers
#pragma once

#include "common/wait.cuh"
#include "params.h"
#include "pipeline.cuh"
#include "rows.cuh"
#include "trace.cuh"

namespace xstage {

// A row to pull.
struct PulledRow {
  int32_t block;  // negative: no more rows
  int32_t in_block;
  int32_t source;
  uint32_t route;
  bool slot_free;  // the ring slot of the block has been seen free
};

// Finds the rows of one warp, in block order; whole warp.
struct PullCursor : ReceivedRows {
  using ReceivedRows::ReceivedRows;

  // Row i of all that this rank received.
  __device__ __forceinline__ PulledRow find(int32_t i) {
    MegaMoePlan const& plan = params.plan;
    int32_t const per_rank = plan.experts_per_rank();
    while (expert < per_rank && i >= end()) next_expert();
    if (expert == per_rank) return {-1, 0, 0, 0, false};
    int32_t const row = i - rows_before;
    int32_t const first_source = static_cast<int32_t>(params.workspace.rank + 1) % plan.world;
    RowSource const from = row_source(plan.world, first_source, row, [&](int32_t s) {
      return __shfl_sync(0xffffffffu, source_rows, s);
    });
    uint32_t const list_begin = __shfl_sync(0xffffffffu, source_before, from.source);
    PulledRow found;
    found.block = blocks_before + row / MegaMoeTraits::kBlockM;
    found.in_block = row % MegaMoeTraits::kBlockM;
    found.source = from.source;
    found.route =
        __ldcg(own.routes(plan, params.layout, bank, from.source) + list_begin + from.index);
    // Lanes may see the counter move at different times, but must take the same way.
    found.slot_free = __all_sync(0xffffffffu, slot_state(found.block) >= whole_linear1(plan));
    return found;
  }

  // Where the row lies.
  __device__ __forceinline__ char const* source_row(PulledRow const& row, int32_t token) const {
    int64_t const offset = int64_t{2} * token * params.plan.hidden;
    if (row.source == params.workspace.rank)
      return reinterpret_cast<char const*>(params.x) + offset;
    return params.view(row.source).token<char>(params.plan, params.layout, 0) + offset;
  }
};

// Segments of the sources' tokens that a pull warp has seen in place. Lane s follows source s.
struct StagedTokens {
  int32_t tokens;  // of a segment; 0: all are in place
  uint32_t seen = 0;

  __device__ __forceinline__ explicit StagedTokens(MegaMoePlan const& plan)
      : tokens(num_segments(plan) == 1 ? 0 : segment_tokens(plan)) {}

  // Whole warp.
  __device__ __forceinline__ bool known(MegaMoeParams const& params, int32_t source,
                                        int32_t token) const {
    if (tokens == 0 || source == params.workspace.rank) return true;
    return __shfl_sync(0xffffffffu, seen, source) >> (token / tokens) & 1;
  }
  // Whole warp. False when it gave up.
  __device__ __forceinline__ bool wait(MegaMoeParams const& params, CallState const& call,
                                       int32_t source, int32_t token) {
    int32_t const segment = token / tokens;
    uint64_t const* const word =
        params.view(params.workspace.rank).staged(params.layout, source, segment);
    WaitSite const site{Phase::kDispatchRows, source, call.epoch, call.epoch};
    if (!warp_wait_until(params.workspace, site, [&] { return ld_acquire_sys(word); })) {
      return false;
    }
    if (static_cast<int32_t>(threadIdx.x % 32) == source) seen |= 1u << segment;
    __syncwarp();
    return true;
  }
};

// Warps 2 and 3: row w, w + W, ... of all rows that this rank received, in block order. While the
// loads of a row are under way the row before is announced and the next one is found.
template <bool kTrace>
__device__ __forceinline__ void pull_rows(MegaMoeParams const& params, CallState const& call,
                                          MegaMoeShared const& shared) {
  using Traits = MegaMoeTraits;
  MegaMoePlan const& plan = params.plan;
  int const lane = threadIdx.x % 32;
  PullCursor cursor(params, call, shared);
  StagedTokens staged(plan);
  uint32_t* const arrived = cursor.own.counter(params.layout, call.bank, MegaMoeCounter::kArrived);
  uint32_t* pending = nullptr;  // counter of the row before
  auto const announce = [&] {
    __syncwarp();
    if (pending != nullptr && lane == 0) red_add_release_gpu(pending, 1);
    pending = nullptr;
  };
  Tracer<kTrace> tracer({params.trace, params.trace_records}, blockIdx.x, TraceTrack::kPull,
                        threadIdx.x == 32 * Traits::kFirstDispatchWarp);
  int32_t const warp = threadIdx.x / 32 - Traits::kFirstDispatchWarp;
  int32_t i = call.block * Traits::kDispatchWarps + warp;
  for (PulledRow next = cursor.find(i); next.block >= 0;) {
    PulledRow const row = next;
    uint64_t const start_ns = Tracer<kTrace>::now();
    int32_t const token = static_cast<int32_t>(row.route) / plan.topk;
    // Whoever waits here must not hold back a row that others may wait for.
    if (!row.slot_free) {
      announce();
      WaitSite const site{Phase::kDispatchRows, -1, call.epoch, whole_linear1(plan)};
      if (!warp_wait_until(params.workspace, site, [&] { return cursor.slot_state(row.block); })) {
        return;
      }
    }
    if (!staged.known(params, row.source, token)) {
      announce();
      if (!staged.wait(params, call, row.source, token)) return;
    }
    int64_t const ring_row =
        int64_t{1} * (row.block % plan.x_ring_blocks) * Traits::kBlockM + row.in_block;
    bool looked = false;
    move_row(cursor.source_row(row, token),
             cursor.own.x_block<char>(plan, params.layout, 0) + ring_row * 2 * plan.hidden,
             2 * plan.hidden, [&] {
               if (looked) return;
               looked = true;
               announce();
               i += call.num_blocks * Traits::kDispatchWarps;
               next = cursor.find(i);
             });
    if (lane == 0) {
      cursor.own.origins(plan, params.layout, row.block)[row.in_block] =
          pack_origin(row.source, row.route);
    }
    pending = arrived + row.block;
    tracer.add(TraceKind::kPull, int64_t{row.block} << 24 | row.in_block, start_ns, 0, 0, 0, 0);
  }
  announce();
}

}  // namespace xstage
