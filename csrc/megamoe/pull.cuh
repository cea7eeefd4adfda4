// The pull: rows that sources have listed for this rank, from their memory into
// the x ring.
//
// Roles: warps 2 and 3 beside the tiles; all warps one row each before they
// part. Global protocol:
//   kStaged[source][segment]  acquire.sys: the source's tokens can be read
//   kLinear1Done              acquire: the x ring slot is free
//   kArrived[b]               red.release.gpu per pulled row -> acquire by the
//   schedulers
#pragma once

#include "common/wait.cuh"
#include "params.h"
#include "pipeline.cuh"
#include "trace.cuh"

namespace xstage {

// One row, by one warp: 16 bytes per lane, eight loads in flight. `meanwhile`
// runs once, behind the first loads: what can be done while they are under way.
template <class Meanwhile>
__device__ __forceinline__ void copy_row(char const* from, char* to, int32_t bytes,
                                         Meanwhile meanwhile) {
  constexpr int kUnroll = 8;
  int32_t const lane_offset = threadIdx.x % 32 * 16;
  for (int32_t first = 0; first < bytes; first += kUnroll * 512) {
    uint4 values[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      int32_t const offset = first + u * 512 + lane_offset;
      if (offset < bytes) values[u] = __ldcg(reinterpret_cast<uint4 const*>(from + offset));
    }
    if (first == 0) meanwhile();
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      int32_t const offset = first + u * 512 + lane_offset;
      if (offset < bytes) *reinterpret_cast<uint4*>(to + offset) = values[u];
    }
  }
}

// A row to pull.
struct PulledRow {
  int32_t block;  // negative: no more rows
  int32_t in_block;
  int32_t source;
  uint32_t route;
  bool slot_free;  // the ring slot of the block has been seen free
};

// Finds the rows of one warp, in block order; whole warp. Lane s < world
// follows source s.
struct PullCursor {
  MegaMoeParams const& params;
  MegaMoeView own;
  uint32_t const* rows;    // received, per local expert
  uint32_t const* counts;  // of this lane's source, or null
  int32_t bank;
  int32_t expert = 0;
  uint32_t source_rows = 0;    // of this lane's source for the expert
  uint32_t source_before = 0;  // and for earlier ones
  int32_t rows_before = 0;     // of earlier experts
  int32_t blocks_before = 0;

  __device__ __forceinline__ PullCursor(MegaMoeParams const& p, CallState const& call,
                                        MegaMoeShared const& shared)
      : params(p), own(p.view(p.workspace.rank)), rows(shared.rows), bank(call.bank) {
    int32_t const lane = threadIdx.x % 32;
    counts = lane < p.plan.world ? own.counts(p.plan, p.layout, bank, lane) : nullptr;
    source_rows = counts ? __ldcg(counts) : 0;
  }

  // Tiles of Linear-1 that free the x ring slot of a block.
  __device__ __forceinline__ uint32_t const* slot_word(int32_t block) const {
    return own.counter(params.layout, bank, MegaMoeCounter::kLinear1Done) + block -
           params.plan.x_ring_blocks;
  }
  __device__ __forceinline__ uint32_t slot_target() const {
    return params.plan.linear1_tiles() * MegaMoeTraits::kMathWarps;
  }

  // The m-block of row i of all that this rank received; negative: there are
  // not so many. Moves forwards.
  __device__ __forceinline__ int32_t seek(int32_t i) {
    int32_t const per_rank = params.plan.experts_per_rank();
    while (expert < per_rank && i >= rows_before + static_cast<int32_t>(rows[expert])) {
      rows_before += rows[expert];
      blocks_before += ceil_div<int32_t>(rows[expert], MegaMoeTraits::kBlockM);
      source_before += source_rows;
      ++expert;
      source_rows = counts && expert < per_rank ? __ldcg(counts + expert) : 0;
    }
    return expert < per_rank ? blocks_before + (i - rows_before) / MegaMoeTraits::kBlockM : -1;
  }

  // Row i, which lies in the block that seek(i) has returned.
  __device__ __forceinline__ PulledRow take(int32_t i, int32_t block) const {
    MegaMoePlan const& plan = params.plan;
    int32_t const row = i - rows_before;
    int32_t const first_source = static_cast<int32_t>(params.workspace.rank + 1) % plan.world;
    RowSource const from = row_source(plan.world, first_source, row, [&](int32_t s) {
      return __shfl_sync(0xffffffffu, source_rows, s);
    });
    uint32_t const list_begin = __shfl_sync(0xffffffffu, source_before, from.source);
    PulledRow found;
    found.block = block;
    found.in_block = row % MegaMoeTraits::kBlockM;
    found.source = from.source;
    found.route =
        __ldcg(own.routes(plan, params.layout, bank, from.source) + list_begin + from.index);
    found.slot_free =
        block < plan.x_ring_blocks || ld_acquire_gpu(slot_word(block)) >= slot_target();
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

// Segments of the sources' tokens that a pull warp has seen in place. Lane s
// follows source s.
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
  // False when it gave up.
  __device__ __forceinline__ bool wait(MegaMoeParams const& params, CallState const& call,
                                       int32_t source, int32_t token) {
    int32_t const segment = token / tokens;
    uint64_t const* const word =
        params.view(params.workspace.rank).staged(params.layout, source, segment);
    WaitSite const site{Phase::kDispatchRows, source, call.epoch, call.epoch};
    if (!wait_until(params.workspace, site, [&] { return ld_acquire_sys(word); })) return false;
    if (static_cast<int32_t>(threadIdx.x % 32) == source) seen |= 1u << segment;
    __syncwarp();
    return true;
  }
};

// Copies a row into the x ring and notes where it came from; whole warp.
template <class Meanwhile>
__device__ __forceinline__ void copy_pulled(PullCursor const& cursor, PulledRow const& row,
                                            int32_t token, Meanwhile meanwhile) {
  MegaMoePlan const& plan = cursor.params.plan;
  int64_t const ring_row =
      int64_t{1} * (row.block % plan.x_ring_blocks) * MegaMoeTraits::kBlockM + row.in_block;
  copy_row(cursor.source_row(row, token),
           cursor.own.x_block<char>(plan, cursor.params.layout, 0) + ring_row * 2 * plan.hidden,
           2 * plan.hidden, meanwhile);
  if (threadIdx.x % 32 == 0) {
    cursor.own.origins(plan, cursor.params.layout, row.block)[row.in_block] =
        pack_origin(row.source, row.route);
  }
}

// The first rows are pulled by all warps, one each, before they part: the first
// tiles wait for nothing else, and more loads in flight bring them sooner. Not
// where x is copied in segments, which the math warps do at that time; and only
// rows of blocks whose ring slot has not been used.
struct FirstRows {
  int32_t count;
  int32_t most_blocks;

  __device__ __forceinline__ FirstRows(MegaMoeParams const& params, CallState const& call) {
    bool const segments = params.plan.world > 1 && num_segments(params.plan) > 1;
    count = segments ? 0 : call.num_blocks * (MegaMoeTraits::kThreads / 32);
    most_blocks = params.plan.x_ring_blocks;
  }
  __device__ __forceinline__ bool contains(int32_t i, int32_t block) const {
    return i < count && block < most_blocks;
  }
};

__device__ __forceinline__ void pull_first_rows(MegaMoeParams const& params, CallState const& call,
                                                MegaMoeShared const& shared) {
  FirstRows const first(params, call);
  int32_t const i = threadIdx.x / 32 * call.num_blocks + call.block;
  if (first.count == 0) return;
  PullCursor cursor(params, call, shared);
  int32_t const block = cursor.seek(i);
  if (block < 0 || !first.contains(i, block)) return;
  PulledRow const row = cursor.take(i, block);
  copy_pulled(cursor, row, static_cast<int32_t>(row.route) / params.plan.topk, [] {});
  __syncwarp();
  uint32_t* const arrived =
      cursor.own.counter(params.layout, call.bank, MegaMoeCounter::kArrived) + block;
  if (threadIdx.x % 32 == 0) red_add_release_gpu(arrived, 1);
}

// Warps 2 and 3: row w, w + W, ... of all rows that this rank received, in
// block order. While the loads of a row are under way the row before is
// announced and the next one is found.
template <bool kTrace>
__device__ __forceinline__ void pull_rows(MegaMoeParams const& params, CallState const& call,
                                          MegaMoeShared const& shared) {
  using Traits = MegaMoeTraits;
  FirstRows const first(params, call);
  PullCursor cursor(params, call, shared);
  StagedTokens staged(params.plan);
  uint32_t* const arrived = cursor.own.counter(params.layout, call.bank, MegaMoeCounter::kArrived);
  uint32_t* pending = nullptr;  // counter of the row before
  auto const announce = [&] {
    __syncwarp();
    if (pending != nullptr && threadIdx.x % 32 == 0) red_add_release_gpu(pending, 1);
    pending = nullptr;
  };
  int32_t const stride = call.num_blocks * Traits::kDispatchWarps;
  int32_t i = call.block * Traits::kDispatchWarps + threadIdx.x / 32 - Traits::kFirstDispatchWarp;
  auto const find_next = [&]() -> PulledRow {
    int32_t block = cursor.seek(i);
    while (block >= 0 && first.contains(i, block)) block = cursor.seek(i += stride);
    return block >= 0 ? cursor.take(i, block) : PulledRow{-1, 0, 0, 0, false};
  };
  Tracer<kTrace> tracer({params.trace, params.trace_records}, blockIdx.x, TraceTrack::kPull,
                        threadIdx.x == 32 * Traits::kFirstDispatchWarp);
  for (PulledRow next = find_next(); next.block >= 0;) {
    PulledRow const row = next;
    uint64_t const start_ns = Tracer<kTrace>::now();
    int32_t const token = static_cast<int32_t>(row.route) / params.plan.topk;
    // Whoever waits here must not hold back a row that others may wait for.
    if (!row.slot_free) {
      announce();
      uint32_t const* const word = cursor.slot_word(row.block);
      WaitSite const site{Phase::kDispatchRows, -1, call.epoch, cursor.slot_target()};
      if (!wait_until(params.workspace, site, [&]() -> uint64_t { return ld_acquire_gpu(word); })) {
        return;
      }
    }
    if (!staged.known(params, row.source, token)) {
      announce();
      if (!staged.wait(params, call, row.source, token)) return;
    }
    copy_pulled(cursor, row, token, [&] {
      i += stride;
      next = find_next();
      announce();  // waits for the loads, so it comes last
    });
    pending = arrived + row.block;
    tracer.add(TraceKind::kPull, int64_t{row.block} << 24 | row.in_block, start_ns, 0, 0, 0, 0);
  }
  announce();
}

}  // namespace xstage
