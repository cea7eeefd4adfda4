// The push (plan.dispatch = 1), the owners' part: rows of the x ring, copied from tokens that sources
// have sent (push.cuh), or from this rank's own, in block order. A token that several experts want is
// copied for each.
//
// Rows are drawn, not dealt: a warp that still sends takes none.
//
// Roles: warps 2 and 3, beside the tiles.
// Global protocol:
//   kRowTickets        atomic: the next rows
//   kTokenHere[place]  acquire.sys: the token of a peer is here
//   kLinear1Done       acquire: the x ring slot is free
//   kArrived[b]        red.release.gpu per group of rows -> acquire by the schedulers
// No deadlock: a warp takes ever later rows, and waits for tokens, whose sources never wait, and for
// slots, which are freed by tiles that need only rows before its own.
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

// Finds rows by their number among all that this rank received; numbers only grow. Whole warp; lane
// s < world follows source s. Rows of an expert lie source after source, this rank's first.
struct UnpackCursor {
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

  __device__ __forceinline__ UnpackCursor(MegaMoeParams const& p, CallState const& call,
                                          MegaMoeShared const& shared)
      : params(p), own(p.view(p.workspace.rank)), rows(shared.rows), bank(call.bank) {
    int32_t const lane = threadIdx.x % 32;
    counts =
        lane < p.plan.world ? own.counts(p.plan, p.layout, bank, lane, p.workspace.rank) : nullptr;
    source_rows = counts ? __ldcg(counts) : 0;
  }

  // Rows [first, last), of which lane l wants first + l.
  __device__ __forceinline__ UnpackedRow find(int32_t first, int32_t last) {
    MegaMoePlan const& plan = params.plan;
    int32_t const wanted = first + static_cast<int32_t>(threadIdx.x % 32);
    UnpackedRow found;
    for (;;) {
      int32_t const end = rows_before + static_cast<int32_t>(rows[expert]);
      int32_t const row = wanted - rows_before;
      bool const here = wanted < min_of(end, last) && row >= 0;
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
      if (last <= end) return found;
      rows_before = end;
      blocks_before += ceil_div<int32_t>(rows[expert], MegaMoeTraits::kBlockM);
      source_before += source_rows;
      ++expert;
      source_rows = counts ? __ldcg(counts + expert) : 0;
    }
  }
};

// Warps 2 and 3. A group of rows is announced behind the first loads of the next.
template <bool kTrace>
__device__ __forceinline__ void unpack_rows(MegaMoeParams const& params, CallState const& call,
                                            MegaMoeShared const& shared) {
  using Traits = MegaMoeTraits;
  MegaMoePlan const& plan = params.plan;
  int const lane = threadIdx.x % 32;
  int32_t const rank = static_cast<int32_t>(params.workspace.rank);
  UnpackCursor cursor(params, call, shared);
  MegaMoeView const own = cursor.own;
  auto const counter = [&](MegaMoeCounter which) {
    return own.counter(params.layout, call.bank, which);
  };
  uint32_t* const tickets = counter(MegaMoeCounter::kRowTickets);
  uint32_t* const arrived = counter(MegaMoeCounter::kArrived);
  int32_t const row_bytes = 2 * plan.hidden;
  int const most = max_of(1, kGroupBytes / row_bytes);
  int32_t total = 0;
  for (int32_t e = lane; e < plan.experts_per_rank(); e += 32) total += shared.rows[e];
  total = __reduce_add_sync(0xffffffffu, total);
  // Few rows: a share for every warp.
  int32_t const rows_each = max_of(
      1, min_of(kRowBatch, ceil_div(total, 4 * Traits::kDispatchWarps * call.num_blocks)));
  Tracer<kTrace> tracer({params.trace, params.trace_records}, blockIdx.x, TraceTrack::kPull,
                        threadIdx.x == 32 * Traits::kFirstDispatchWarp);
  int32_t pending = -1;  // block of this lane's row in the group before
  auto const announce = [&] {
    if (!__any_sync(0xffffffffu, pending >= 0)) return;
    __syncwarp();
    uint32_t const alike = __match_any_sync(0xffffffffu, pending);
    if (pending >= 0 && lane == __ffs(alike) - 1) {
      red_add_release_gpu(arrived + pending, __popc(alike));
    }
    pending = -1;
  };
  auto const draw = [&] { return lane == 0 ? atomicAdd(tickets, 1u) : 0u; };
  uint32_t ticket = draw();
  for (;;) {
    int32_t const first = uniform(static_cast<int32_t>(ticket)) * rows_each;
    if (first >= total) break;
    int const count = min_of(rows_each, total - first);
    UnpackedRow const row = cursor.find(first, first + count);
    ticket = draw();
    bool const here = row.block >= 0;
    uint64_t const* token_here = nullptr;  // of a peer's token
    uint32_t const* slot = nullptr;        // tiles that free the slot of the ring
    char const* from = nullptr;
    char* to = nullptr;
    if (here) {
      int32_t const token = static_cast<int32_t>(row.route) / plan.topk;
      int64_t place = token;
      if (row.source == rank) {
        from = reinterpret_cast<char const*>(params.x);
      } else {
        int32_t const distance = (row.source - rank + plan.world) % plan.world;
        place = plan.token_place(distance, plan.token_set(row.expert), token);
        from = own.token<char>(plan, params.layout, 0);
        token_here = own.token_here(params.layout, place);
      }
      from += place * row_bytes;
      bulk_prefetch_l2(from, row_bytes);
      int64_t const ring_row = int64_t{row.block % plan.x_ring_blocks} * Traits::kBlockM;
      to = own.x_block<char>(plan, params.layout, 0) + (ring_row + row.in_block) * row_bytes;
      if (row.block >= plan.x_ring_blocks) {
        slot = counter(MegaMoeCounter::kLinear1Done) + row.block - plan.x_ring_blocks;
      }
      own.origins(plan, params.layout, row.block)[row.in_block] =
          pack_origin(row.source, row.route);
    }
    auto const slot_free = [&] {
      return slot == nullptr || ld_acquire_gpu(slot) >= whole_linear1(plan);
    };
    auto const token_came = [&] {
      return token_here == nullptr || ld_acquire_sys(token_here) >= call.epoch;
    };
    bool open = here && slot_free() && token_came();
    for (int at = 0; at < count;) {
      uint64_t const start_ns = Tracer<kTrace>::now();
      // Rows up to the first that has to wait: others may wait for those before it.
      uint32_t const closed = ~__ballot_sync(0xffffffffu, open) >> at;
      __syncwarp();  // all lanes read and store what one has seen there and free
      int const ready = min_of(min_of(__ffs(closed) - 1, most), count - at);
      if (ready == 0) {
        announce();
        bool const mine = lane == at;
        WaitSite const slot_site{Phase::kDispatchRows, -1, call.epoch, whole_linear1(plan)};
        if (!warp_wait_until(params.workspace, slot_site, [&]() -> uint64_t {
              return mine && slot != nullptr ? ld_acquire_gpu(slot) : whole_linear1(plan);
            })) {
          return;
        }
        WaitSite const token_site{Phase::kDispatchRows, row.source, call.epoch, call.epoch};
        if (!warp_wait_until(params.workspace, token_site, [&]() -> uint64_t {
              return mine && token_here != nullptr ? ld_acquire_sys(token_here) : call.epoch;
            })) {
          return;
        }
        open = here && (open || mine || (slot_free() && token_came()));
        continue;
      }
      uint32_t const group = ((1u << ready) - 1) << at;
      move_rows(group, from, to, row_bytes, announce);
      pending = group >> lane & 1 ? row.block : -1;
      tracer.add(TraceKind::kPull, int64_t{row.block} << 24, start_ns, ready, 0, 0, 0);
      at += ready;
    }
  }
  announce();
}

}  // namespace xstage
