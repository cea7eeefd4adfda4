// The push (plan.dispatch = 1), the owners' part: rows of the x ring, copied from tokens that
// sources have sent (push.cuh), or from this rank's own, in block order. A token that several
// experts want is copied for each.
//
// Rows are drawn, not dealt: a warp that still sends takes none.
//
// Roles: warps 2 and 3, beside the tiles; warp 3 when it has sent this rank's tokens.
// Global protocol:
//   kRowTickets        atomic: the next rows
//   kTokenHere[place]  acquire.sys: the token of a peer is here
//   kLinear1Done       acquire: the x ring slot is free
//   kArrived[b]        red.release.gpu per group of rows -> acquire by the schedulers
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

// A row to copy; lanes without one have a negative block.
struct UnpackedRow {
  int32_t block = -1;
  int32_t in_block = 0;
  int32_t source = -1;
  uint32_t route = 0;
  int32_t expert = 0;
};

// Finds rows by their number among all that this rank received; whole warp.
struct UnpackCursor : ReceivedRows {
  using ReceivedRows::ReceivedRows;

  // Rows [first, last), of which lane l wants first + l.
  __device__ __forceinline__ UnpackedRow find(int32_t first, int32_t last) {
    MegaMoePlan const& plan = params.plan;
    int32_t const wanted = first + static_cast<int32_t>(threadIdx.x % 32);
    UnpackedRow found;
    for (;;) {
      int32_t const row = wanted - rows_before;
      bool const here = wanted < min_of(end(), last) && row >= 0;
      int32_t begin = 0;  // of a source's rows
      int32_t index = 0;
      for (int32_t i = 0; i < plan.world; ++i) {
        int32_t const source = (static_cast<int32_t>(params.workspace.rank) + i) % plan.world;
        int32_t const count = __shfl_sync(0xffffffffu, source_rows, source);
        int32_t const before = __shfl_sync(0xffffffffu, source_before, source);
        if (here && row >= begin && row < begin + count) {
          found.source = source;
          index = before + row - begin;
        }
        begin += count;
      }
      if (here) {
        found.block = blocks_before + row / MegaMoeTraits::kBlockM;
        found.in_block = row % MegaMoeTraits::kBlockM;
        found.route = __ldcg(own.routes(plan, params.layout, bank, found.source) + index);
        found.expert = expert;
      }
      if (last <= end()) return found;
      next_expert();
    }
  }
};

// Rows that a warp copies together; lane l has the l-th.
struct RowBatch {
  int32_t count = 0;  // none are left
  int32_t from = 0;   // place of a peer's token, or ~token of this rank
  int32_t ring_row = 0;
  int32_t block = -1;  // a lane without a row
};

// Warps 2 and 3. Rows are announced behind the first loads of the next.
template <bool kTrace>
__device__ __forceinline__ void unpack_rows(MegaMoeParams const& params, CallState const& call,
                                            MegaMoeShared const& shared) {
  using Traits = MegaMoeTraits;
  MegaMoePlan const& plan = params.plan;
  int const lane = threadIdx.x % 32;
  int32_t const rank = static_cast<int32_t>(params.workspace.rank);
  UnpackCursor cursor(params, call, shared);
  MegaMoeView const own = params.view(rank);
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
  Tracer<kTrace> tracer({params.trace, params.trace_records}, blockIdx.x, TraceTrack::kPull,
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
  auto const from_row = [&](int32_t from) {
    char const* const base = from < 0 ? reinterpret_cast<char const*>(params.x)
                                      : own.token<char>(plan, params.layout, 0);
    return base + int64_t{from < 0 ? ~from : from} * row_bytes;
  };
  auto const token_came = [&](int32_t from) {
    return from < 0 ? call.epoch : ld_acquire_sys(own.token_here(params.layout, from));
  };
  auto const draw = [&] {
    return lane == 0 ? atomicAdd(counter(MegaMoeCounter::kRowTickets), 1u) : 0u;
  };
  uint32_t ticket = draw();
  auto const next_batch = [&] {
    RowBatch batch;
    int32_t const first = uniform(static_cast<int32_t>(ticket)) * rows_each;
    if (first >= total) return batch;
    ticket = draw();
    batch.count = min_of(rows_each, total - first);
    UnpackedRow const row = cursor.find(first, first + batch.count);
    if (row.block < 0) return batch;
    int32_t const token = static_cast<int32_t>(row.route) / plan.topk;
    int32_t const distance = (row.source - rank + plan.world) % plan.world;
    batch.from =
        distance == 0 ? ~token : plan.token_place(distance, plan.token_set(row.expert), token);
    batch.block = row.block;
    batch.ring_row = row.block % plan.x_ring_blocks * Traits::kBlockM + row.in_block;
    own.origins(plan, params.layout, row.block)[row.in_block] = pack_origin(row.source, row.route);
    return batch;
  };
  for (;;) {
    RowBatch const batch = next_batch();
    if (batch.count == 0) break;
    auto const ready = [&] {
      return batch.block >= 0 && cursor.slot_state(batch.block) >= whole_linear1(plan) &&
             token_came(batch.from) >= call.epoch;
    };
    bool open = ready();
    for (int at = 0; at < batch.count;) {
      uint64_t const start_ns = Tracer<kTrace>::now();
      // Rows up to the first that has to wait: others may wait for those before it.
      uint32_t const closed = ~__ballot_sync(0xffffffffu, open) >> at;
      __syncwarp();  // all lanes read and store what one has seen there and free
      int const count = min_of(__ffs(closed) - 1, batch.count - at);
      if (count == 0) {
        announce();
        bool const mine = lane == at;
        int32_t const distance = batch.from / (plan.token_sets * plan.max_tokens) + 1;
        WaitSite const slot{Phase::kDispatchRows, -1, call.epoch, whole_linear1(plan)};
        WaitSite const token{Phase::kDispatchRows, (rank + distance) % plan.world, call.epoch,
                             call.epoch};
        if (!warp_wait_until(params.workspace, slot, [&]() -> uint64_t {
              return mine ? cursor.slot_state(batch.block) : whole_linear1(plan);
            })) {
          return;
        }
        if (!warp_wait_until(params.workspace, token, [&]() -> uint64_t {
              return mine ? token_came(batch.from) : call.epoch;
            })) {
          return;
        }
        open = open || mine || ready();
        continue;
      }
      uint32_t const group = ((1u << count) - 1) << at;
      char* const ring = own.x_block<char>(plan, params.layout, 0);
      move_rows(
          group, row_bytes, [&](int of) { return from_row(of_lane(batch.from, of)); },
          [&](int of) { return ring + int64_t{of_lane(batch.ring_row, of)} * row_bytes; },
          announce);
      pending = group >> lane & 1 ? batch.block : -1;
      tracer.add(TraceKind::kPull, int64_t{batch.block} << 24, start_ns, 0, 0, 0, 0);
      at += count;
    }
  }
  announce();
}

}  // namespace xstage
