// Rows of the x ring, in block order: pulled from the memory of their sources (plan.dispatch = 0), or
// copied from tokens that sources have sent (1, push.cuh); this rank's own from x. A token that
// several experts want comes for each.
//
// Rows are drawn, not dealt: a warp that still sends takes none, and one that waits few.
//
// Roles: warps 2 and 3, beside the tiles; in a push, warp 3 when it has sent this rank's tokens.
// Global protocol:
//   kRowTickets                atomic: the next rows
//   kStaged[source][segment]   acquire.sys: pulled, the source's tokens can be read (a single
//                              segment: kDispatchSignals, in the prologue)
//   kTokenHere[place]          acquire.sys: pushed, the token is here
//   kLinear1Done               acquire: the x ring slot is free
//   kArrived[b]                red.release.gpu per group of rows -> acquire by the schedulers
// No deadlock: a warp takes ever later rows, and announces what it has copied before it waits: for
// tokens, whose sources never wait, or for slots, which are freed by tiles that need only rows
// before its own.
#pragma once

#include "common/wait.cuh"
#include "params.h"
#include "pipeline.cuh"
#include "rows.cuh"
#include "trace.cuh"

namespace xstage {

constexpr int kRowBatch = 16;  // rows that a warp draws at a time, one per lane, at most
static_assert(kRowBatch < 32, "a lane without a row ends every group");

// A row to copy; lanes without one have a negative block.
struct ReceivedRow {
  int32_t block = -1;
  int32_t in_block = 0;
  int32_t source = -1;
  uint32_t route = 0;
  int32_t expert = 0;
};

// Finds rows by their number among all that this rank received; numbers only grow. Whole warp; lane
// s < world follows source s.
struct RowCursor {
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

  __device__ __forceinline__ RowCursor(MegaMoeParams const& p, CallState const& call,
                                       MegaMoeShared const& shared)
      : params(p), own(p.view(p.workspace.rank)), rows(shared.rows), bank(call.bank) {
    int32_t const lane = threadIdx.x % 32;
    counts = lane < p.plan.world ? own.counts(p.plan, p.layout, bank, lane) : nullptr;
    source_rows = counts ? __ldcg(counts) : 0;
  }

  // Rows [first, last), of which lane l wants first + l.
  __device__ __forceinline__ ReceivedRow find(int32_t first, int32_t last) {
    MegaMoePlan const& plan = params.plan;
    int32_t const wanted = first + static_cast<int32_t>(threadIdx.x % 32);
    int32_t const rank = static_cast<int32_t>(params.workspace.rank);
    auto const count_of = [&](int32_t source) {
      return __shfl_sync(0xffffffffu, source_rows, source);
    };
    auto const all_done = [](bool done) { return __all_sync(0xffffffffu, done) != 0; };
    ReceivedRow found;
    for (;;) {
      int32_t const end = rows_before + static_cast<int32_t>(rows[expert]);
      int32_t const row = wanted - rows_before;
      bool const mine = wanted < min_of(end, last) && row >= 0;
      RowSource const from = row_source(plan, rank, mine ? row : -1, count_of, all_done);
      uint32_t const before = __shfl_sync(0xffffffffu, source_before, max_of(from.source, 0));
      if (mine) {
        found.source = from.source;
        found.block = blocks_before + row / MegaMoeTraits::kBlockM;
        found.in_block = row % MegaMoeTraits::kBlockM;
        found.route =
            __ldcg(own.routes(plan, params.layout, bank, from.source) + before + from.index);
        found.expert = expert;
      }
      if (last <= end) return found;
      rows_before = end;
      blocks_before += ceil_div<int32_t>(rows[expert], MegaMoeTraits::kBlockM);
      source_before += source_rows;
      ++expert;
      source_rows = counts ? __ldcg(counts + expert) : 0;
    }
  }
};

// Where a row lies, and the word that says that it is there; null: no need to look.
struct RowOrigin {
  char const* from = nullptr;
  uint64_t const* here = nullptr;
};

__device__ __forceinline__ RowOrigin origin_of(MegaMoeParams const& params,
                                               ReceivedRow const& row) {
  MegaMoePlan const& plan = params.plan;
  int32_t const rank = static_cast<int32_t>(params.workspace.rank);
  MegaMoeView const own = params.view(rank);
  int32_t const token = static_cast<int32_t>(row.route) / plan.topk;
  if (row.source == rank) {
    return {reinterpret_cast<char const*>(params.x) + int64_t{2} * token * plan.hidden, nullptr};
  }
  if (plan.dispatch == kPush) {
    int32_t const distance = (row.source - rank + plan.world) % plan.world;
    int64_t const place = plan.token_place(distance, plan.token_set(row.expert), token);
    return {own.token<char>(plan, params.layout, 0) + int64_t{2} * place * plan.hidden,
            own.token_here(params.layout, place)};
  }
  char const* const from = params.view(row.source).token<char>(plan, params.layout, 0) +
                           int64_t{2} * token * plan.hidden;
  if (num_segments(plan) == 1) return {from, nullptr};
  return {from, own.staged(params.layout, row.source, token / segment_tokens(plan))};
}

// Warps 2 and 3. Rows are announced behind the first loads of the next.
template <bool kTrace>
__device__ __forceinline__ void receive_rows(MegaMoeParams const& params, CallState const& call,
                                             MegaMoeShared const& shared) {
  using Traits = MegaMoeTraits;
  MegaMoePlan const& plan = params.plan;
  int const lane = threadIdx.x % 32;
  RowCursor cursor(params, call, shared);
  MegaMoeView const own = cursor.own;
  auto const counter = [&](MegaMoeCounter which) {
    return own.counter(params.layout, call.bank, which);
  };
  int32_t const row_bytes = 2 * plan.hidden;
  int32_t total = 0;
  for (int32_t e = lane; e < plan.experts_per_rank(); e += 32) total += shared.rows[e];
  total = __reduce_add_sync(0xffffffffu, total);
  // Few rows: every warp draws some.
  int32_t const fair = ceil_div(total, 4 * Traits::kDispatchWarps * call.num_blocks);
  int32_t const rows_each = max_of(1, min_of(min_of(kGroupBytes / row_bytes, kRowBatch), fair));
  Tracer<kTrace> tracer({params.trace, params.trace_records}, blockIdx.x, TraceTrack::kRows,
                        threadIdx.x == 32 * Traits::kFirstDispatchWarp);
  int32_t pending = -1;  // block of this lane's row that is copied, but not announced
  auto const announce = [&] {
    if (!__any_sync(0xffffffffu, pending >= 0)) return;
    __syncwarp();
    uint32_t const alike = __match_any_sync(0xffffffffu, pending);
    if (pending >= 0 && lane == __ffs(alike) - 1) {
      red_add_release_gpu(counter(MegaMoeCounter::kArrived) + pending, __popc(alike));
    }
    pending = -1;
  };
  // How far Linear-1 is with the block that held the slot of `block` before.
  auto const slot_state = [&](int32_t block) -> uint64_t {
    block -= plan.x_ring_blocks;
    uint32_t const* const done = counter(MegaMoeCounter::kLinear1Done);
    return block < 0 ? whole_linear1(plan) : ld_acquire_gpu(done + block);
  };
  auto const draw = [&] {
    return lane == 0 ? atomicAdd(counter(MegaMoeCounter::kRowTickets), 1u) : 0u;
  };
  uint32_t ticket = draw();
  for (;;) {
    int32_t const first = uniform(static_cast<int32_t>(ticket)) * rows_each;
    if (first >= total) break;
    ticket = draw();
    int32_t const batch = min_of(rows_each, total - first);
    ReceivedRow const row = cursor.find(first, first + batch);
    RowOrigin origin;
    int32_t ring_row = 0;
    if (row.block >= 0) {
      origin = origin_of(params, row);
      ring_row = row.block % plan.x_ring_blocks * Traits::kBlockM + row.in_block;
      own.origins(plan, params.layout, row.block)[row.in_block] =
          pack_origin(row.source, row.route);
    }
    auto const arrived = [&] {
      return origin.here == nullptr ? call.epoch : ld_acquire_sys(origin.here);
    };
    auto const ready = [&] {
      return row.block >= 0 && slot_state(row.block) >= whole_linear1(plan) &&
             arrived() >= call.epoch;
    };
    bool open = ready();
    for (int at = 0; at < batch;) {
      uint64_t const start_ns = Tracer<kTrace>::now();
      // Rows up to the first that has to wait: others may wait for those before it.
      uint32_t const closed = ~__ballot_sync(0xffffffffu, open) >> at;
      __syncwarp();  // orders what all lanes load and store behind the acquires of the one that looked
      int const count = min_of(__ffs(closed) - 1, batch - at);
      if (count == 0) {
        announce();
        bool const mine = lane == at;
        WaitSite const slot{Phase::kDispatchRows, -1, call.epoch, whole_linear1(plan)};
        WaitSite const token{Phase::kDispatchRows, row.source, call.epoch, call.epoch};
        if (!warp_wait_until(params.workspace, slot, [&]() -> uint64_t {
              return mine ? slot_state(row.block) : whole_linear1(plan);
            })) {
          return;
        }
        if (!warp_wait_until(params.workspace, token,
                             [&]() -> uint64_t { return mine ? arrived() : call.epoch; })) {
          return;
        }
        open = open || mine || ready();
        continue;
      }
      uint32_t const group = ((1u << count) - 1) << at;
      char* const ring = own.x_block<char>(plan, params.layout, 0);
      move_rows(
          group, row_bytes, [&](int of) { return of_lane(origin.from, of); },
          [&](int of) { return ring + int64_t{of_lane(ring_row, of)} * row_bytes; }, announce);
      pending = group >> lane & 1 ? row.block : -1;
      tracer.add(TraceKind::kRows, int64_t{row.block} << 24, start_ns, 0, 0, 0, 0);
      at += count;
    }
  }
  announce();
}

}  // namespace xstage
