// Dispatch: count and list the rows for every expert, tell the owners, pull what others list for
// us.
//
// Roles: the prologue is run by all warps of every block, before the tiles; the pull by warps 2 and
// 3 beside them; segments of x are copied by the math warps before their first tile. Shared memory: counts and positions per expert, in the memory of the stages.
// Global protocol (bank = epoch mod 2, all words are private to this rank unless said otherwise):
//   kSendCounts    red, every block -> grid barrier kCountsAdded -> read by every block
//   kSendCursors   atomics of every block
//   kRoutes, kCounts, kTokens (read or written by peers) -> grid barrier kRoutesStored; its last
//                  arrival stores kDispatchSignals of every owner (release.sys)
//   kDispatchSignals[source] -> acquire.sys by every block
//   kStaged[source][segment]  last block of a source, st.release.sys -> acquire.sys by the pull
//   kArrived[b]    red.release.gpu per pulled row -> acquire by the loaders
//   kLinear1Done   acquire by the pull: the x ring slot is free
#pragma once

#include "common/channel.cuh"
#include "params.h"
#include "pipeline.cuh"
#include "trace.cuh"

namespace xstage {

// The id of choice i as given.
__device__ __forceinline__ int64_t expert_id(MegaMoeParams const& params, int64_t i) {
  return params.idx_is_64 ? static_cast<int64_t const*>(params.topk_idx)[i]
                          : static_cast<int32_t const*>(params.topk_idx)[i];
}

// The expert of choice i, or -1 for one to skip.
__device__ __forceinline__ int32_t expert_of(MegaMoeParams const& params, int64_t i) {
  int64_t const id = expert_id(params, i);
  return id >= 0 && id < params.plan.num_experts ? static_cast<int32_t>(id) : -1;
}

// Zeroes the counters that the next call will use; the call before this one, which used them, is
// over by stream order.
__device__ __forceinline__ void clear_next_bank(MegaMoeParams const& params,
                                                CallState const& call) {
  uint32_t* const words = params.view(params.workspace.rank)
                              .counter(params.layout, call.bank ^ 1, MegaMoeCounter::kGridBarriers);
  int64_t const num_words = params.layout.counter_bank / 4;
  for (int64_t i = call.block * blockDim.x + threadIdx.x; i < num_words;
       i += call.num_blocks * blockDim.x) {
    words[i] = 0;
  }
}

// Who of this rank copies.
struct Copiers {
  int32_t index;
  int32_t count;
};

// Copies tokens [first, last) to where peers can read them.
__device__ __forceinline__ void stage_tokens(MegaMoeParams const& params, int32_t first,
                                             int32_t last, Copiers copiers) {
  constexpr int kUnroll = 8;
  int64_t const row_vectors = params.plan.hidden / 8;
  int64_t const end = last * row_vectors;
  uint4 const* const from = reinterpret_cast<uint4 const*>(params.x);
  uint4* const to =
      params.view(params.workspace.rank).at<uint4>(params.layout, MegaMoeRegion::kTokens);
  for (int64_t i = first * row_vectors + copiers.index; i < end; i += kUnroll * copiers.count) {
    uint4 values[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      int64_t const at = i + int64_t{1} * u * copiers.count;
      if (at < end) values[u] = __ldcs(from + at);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      int64_t const at = i + int64_t{1} * u * copiers.count;
      if (at < end) to[at] = values[u];
    }
  }
}

// The math warps, before their first tile: copy x in segments and tell the owners about each.
__device__ __forceinline__ void stage_segments(MegaMoeParams const& params, CallState const& call) {
  constexpr int kMathThreads = MegaMoeTraits::kMathWarps * 32;
  MegaMoePlan const& plan = params.plan;
  int32_t const rank = static_cast<int32_t>(params.workspace.rank);
  int const thread = threadIdx.x - 128;
  int32_t const tokens = segment_tokens(plan);
  uint32_t* const copied =
      params.view(rank).counter(params.layout, call.bank, MegaMoeCounter::kSegmentsStaged);
  for (int32_t s = 0; s < num_segments(plan); ++s) {
    stage_tokens(params, min_of(s * tokens, call.num_tokens),
                 min_of((s + 1) * tokens, call.num_tokens),
                 {call.block * kMathThreads + thread, call.num_blocks * kMathThreads});
    named_barrier_sync(NamedBarrier::kMath, kMathThreads);
    // Another warp each time, since it waits for the stores.
    if (thread != s % MegaMoeTraits::kMathWarps * 32) continue;
    uint32_t const earlier = atom_add_acq_rel_gpu(copied + s, 1);
    if (earlier + 1 != static_cast<uint32_t>(call.num_blocks)) continue;
    fence_acq_rel_sys();
    for (int32_t i = 1; i < plan.world; ++i) {
      MegaMoeView const owner = params.view((rank + i) % plan.world);
      st_release_sys(owner.staged(params.layout, rank, s), call.epoch);
    }
  }
}

// Lists this block's choices in the owners' kRoutes. Within an expert the order does not matter:
// rows are independent, and results come back by slot.
__device__ __forceinline__ void list_routes(MegaMoeParams const& params, CallState const& call,
                                            MegaMoeShared& shared, int64_t begin, int64_t end) {
  MegaMoePlan const& plan = params.plan;
  MegaMoeView const own = params.view(params.workspace.rank);
  uint32_t const* const send_counts =
      own.counter(params.layout, call.bank, MegaMoeCounter::kSendCounts);
  uint32_t* const cursors = own.counter(params.layout, call.bank, MegaMoeCounter::kSendCursors);
  int const per_rank = plan.experts_per_rank();
  int const lane = threadIdx.x % 32;
  int const group = call.route_group();
  // One warp per owner: exclusive sum of the counts of its experts.
  for (int owner = threadIdx.x / 32; owner < plan.world; owner += blockDim.x / 32) {
    uint32_t before = 0;
    for (int first = 0; first < per_rank; first += 32) {
      int const expert = owner * per_rank + first + lane;
      bool const valid = first + lane < per_rank;
      uint32_t count = 0;
      uint32_t earlier = 0;  // of earlier route groups
#pragma unroll
      for (int g = 0; g < kRouteGroups; ++g) {
        uint32_t const rows = valid ? __ldcg(send_counts + g * plan.num_experts + expert) : 0;
        count += rows;
        if (g < group) earlier += rows;
      }
      uint32_t sum = count;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        uint32_t const other = __shfl_up_sync(0xffffffffu, sum, d);
        if (lane >= d) sum += other;
      }
      if (valid) {
        uint32_t const mine = shared.routing.counts[expert];
        uint32_t const taken =
            mine ? atomicAdd(cursors + group * plan.num_experts + expert, mine) : 0;
        shared.routing.positions[expert] = before + sum - count + earlier + taken;
        if (call.block == 0) {
          params.view(owner).counts(plan, params.layout, call.bank,
                                    params.workspace.rank)[first + lane] = count;
        }
      }
      before += __shfl_sync(0xffffffffu, sum, 31);
    }
  }
  __syncthreads();
  for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
    int32_t const expert = expert_of(params, i);
    if (expert < 0) continue;
    uint32_t const position = atomicAdd(&shared.routing.positions[expert], 1u);
    params.view(expert / per_rank)
        .routes(plan, params.layout, call.bank, params.workspace.rank)[position] =
        static_cast<uint32_t>(i);
  }
}

// Waits until every source has told what it sends, then adds up the rows of each local expert.
__device__ __forceinline__ bool gather_counts(MegaMoeParams const& params, CallState const& call,
                                              MegaMoeShared& shared) {
  Workspace const& workspace = params.workspace;
  MegaMoeView const own = params.view(workspace.rank);
  if (threadIdx.x < 32) {
    bool ok = true;
    int const source = threadIdx.x;
    if (source < workspace.world) {
      uint64_t const* const word = own.dispatch_signal(params.layout, source);
      WaitSite const site{Phase::kDispatchCounts, source, call.epoch, call.epoch};
      ok = wait_until(workspace, site, [&] { return signal_epoch(ld_acquire_sys(word)); });
      // No source can be ahead: its next call needs this rank's signal of this call.
      uint64_t const seen = ok ? ld_acquire_sys(word) : 0;
      uint64_t const expected = workspace.signal(call.epoch);
      if (ok && seen != expected) {
        WaitSite const differs{Phase::kDispatchCounts, source, call.epoch, signal_digest(expected)};
        give_up(workspace, differs, FaultKind::kPlanDiffers, signal_digest(seen), 0);
        ok = false;
      }
    }
    ok = __all_sync(0xffffffffu, ok);
    if (threadIdx.x == 0) shared.ok = ok;
  }
  __syncthreads();
  if (!shared.ok) return false;
  int const per_rank = params.plan.experts_per_rank();
  for (int expert = threadIdx.x; expert < per_rank; expert += blockDim.x) {
    uint32_t rows = 0;
    for (int source = 0; source < params.plan.world; ++source) {
      rows += __ldcg(own.counts(params.plan, params.layout, call.bank, source) + expert);
    }
    shared.rows[expert] = rows;
    if (call.block == 0 && params.expert_load != nullptr) params.expert_load[expert] += rows;
  }
  __syncthreads();
  return true;
}

// All threads of every block. Leaves shared.rows; false when a wait gave up.
__device__ __forceinline__ bool dispatch_prologue(MegaMoeParams const& params,
                                                  CallState const& call, MegaMoeShared& shared) {
  MegaMoePlan const& plan = params.plan;
  Workspace const& workspace = params.workspace;
  MegaMoeView const own = params.view(workspace.rank);
  clear_next_bank(params, call);

  // This block's share of all (token, slot) choices.
  int64_t const choices = int64_t{1} * call.num_tokens * plan.topk;
  int64_t const share = ceil_div<int64_t>(choices, call.num_blocks);
  int64_t const begin = min_of(share * call.block, choices);
  int64_t const end = min_of(begin + share, choices);
  for (int e = threadIdx.x; e < plan.num_experts; e += blockDim.x) shared.routing.counts[e] = 0;
  __syncthreads();
  int64_t bad_id = -1;
  for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
    int64_t const id = expert_id(params, i);
    if (id >= 0 && id < plan.num_experts) {
      atomicAdd(&shared.routing.counts[id], 1u);
    } else if (id != -1) {
      bad_id = id;
    }
  }
  if (bad_id >= 0 || bad_id < -1) {  // masked, and reported at the next call
    WaitSite const site{Phase::kDispatchCounts, -1, call.epoch,
                        static_cast<uint64_t>(plan.num_experts)};
    record_fault(workspace, kMaskedRecord, site, FaultKind::kBadExpert,
                 static_cast<uint64_t>(bad_id), 0);
  }
  __syncthreads();
  uint32_t* const send_counts = own.counter(params.layout, call.bank, MegaMoeCounter::kSendCounts);
  for (int e = threadIdx.x; e < plan.num_experts; e += blockDim.x) {
    uint32_t* const rows = send_counts + call.route_group() * plan.num_experts + e;
    if (shared.routing.counts[e] != 0) atomicAdd(rows, shared.routing.counts[e]);
  }
  __syncthreads();
  uint32_t* const barriers = own.counter(params.layout, call.bank, MegaMoeCounter::kGridBarriers);
  if (threadIdx.x == 0) red_add_release_gpu(barriers + kCountsAdded, 1);

  // Rows of this rank's own tokens are pulled from x itself.
  if (plan.world > 1 && num_segments(plan) == 1) {
    stage_tokens(params, 0, call.num_tokens,
                 {static_cast<int32_t>(call.block * blockDim.x + threadIdx.x),
                  static_cast<int32_t>(call.num_blocks * blockDim.x)});
  }

  if (threadIdx.x == 0) {
    WaitSite const site{Phase::kGridBarrier, -1, call.epoch,
                        static_cast<uint64_t>(call.num_blocks)};
    shared.ok = wait_until(workspace, site,
                           [&]() -> uint64_t { return ld_acquire_gpu(barriers + kCountsAdded); });
  }
  __syncthreads();
  if (!shared.ok) return false;
  list_routes(params, call, shared, begin, end);
  __syncthreads();
  if (threadIdx.x == 0) {
    fence_acq_rel_sys();
    uint32_t const earlier = atom_add_acq_rel_gpu(barriers + kRoutesStored, 1);
    if (earlier + 1 == static_cast<uint32_t>(call.num_blocks)) {
      // Cumulative: what the other blocks released above comes before the signals.
      fence_acq_rel_sys();
      for (int64_t i = 1; i <= workspace.world; ++i) {
        int64_t const owner = (workspace.rank + i) % workspace.world;
        st_release_sys(
            params.view(owner).dispatch_signal(params.layout, static_cast<int32_t>(workspace.rank)),
            workspace.signal(call.epoch));
      }
    }
  }
  bool const ok = gather_counts(params, call, shared);
  // The stages' memory was used by ordinary accesses; loads by the async proxy come next.
  fence_proxy_async_shared();
  __syncthreads();
  return ok;
}

// One row, by one warp: 16 bytes per lane, eight loads in flight.
__device__ __forceinline__ void copy_row(char const* from, char* to, int32_t bytes, int lane) {
  constexpr int kUnroll = 8;
  int32_t offset = lane * 16;
  for (; offset + (kUnroll - 1) * 512 < bytes; offset += kUnroll * 512) {
    uint4 values[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      values[u] = __ldcg(reinterpret_cast<uint4 const*>(from + offset + u * 512));
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      *reinterpret_cast<uint4*>(to + offset + u * 512) = values[u];
    }
  }
  for (; offset < bytes; offset += 512) {
    *reinterpret_cast<uint4*>(to + offset) = __ldcg(reinterpret_cast<uint4 const*>(from + offset));
  }
}

// Segments of the sources' tokens that a pull warp has seen in place. Lane s follows source s.
struct StagedTokens {
  uint32_t seen = 0;

  // Waits for the segment of a token; whole warp, false when it gave up.
  __device__ __forceinline__ bool wait(MegaMoeParams const& params, CallState const& call,
                                       int32_t source, int32_t token) {
    if (source == params.workspace.rank || num_segments(params.plan) == 1) return true;
    int32_t const segment = token / segment_tokens(params.plan);
    if (__shfl_sync(0xffffffffu, seen, source) >> segment & 1) return true;
    uint64_t const* const word =
        params.view(params.workspace.rank).staged(params.layout, source, segment);
    WaitSite const site{Phase::kDispatchRows, source, call.epoch, call.epoch};
    if (!wait_until(params.workspace, site, [&] { return ld_acquire_sys(word); })) return false;
    if (static_cast<int32_t>(threadIdx.x % 32) == source) seen |= 1u << segment;
    __syncwarp();
    return true;
  }
};

// Warps 2 and 3: row w, w + W, ... of all rows that this rank received, in block order.
template <bool kTrace>
__device__ __forceinline__ void pull_rows(MegaMoeParams const& params, CallState const& call,
                                          MegaMoeShared const& shared) {
  using Traits = MegaMoeTraits;
  MegaMoePlan const& plan = params.plan;
  MegaMoeLayout const& layout = params.layout;
  int32_t const rank = static_cast<int32_t>(params.workspace.rank);
  MegaMoeView const own = params.view(rank);
  uint32_t* const arrived = own.counter(layout, call.bank, MegaMoeCounter::kArrived);
  uint32_t const* const linear1_done = own.counter(layout, call.bank, MegaMoeCounter::kLinear1Done);
  uint64_t const linear1_target = uint64_t{1} * plan.linear1_tiles() * Traits::kMathWarps;
  int const lane = threadIdx.x % 32;
  int32_t const per_rank = plan.experts_per_rank();
  int32_t const row_bytes = 2 * plan.hidden;
  Tracer<kTrace> tracer({params.trace, params.trace_records}, blockIdx.x, TraceTrack::kPull,
                        threadIdx.x == 64);

  // Lane s < world follows source s: its rows for the current expert and for all earlier ones.
  uint32_t const* const counts =
      lane < plan.world ? own.counts(plan, layout, call.bank, lane) : nullptr;
  int32_t expert = 0;
  uint32_t source_rows = counts ? __ldcg(counts) : 0;
  uint32_t source_before = 0;
  int32_t rows_before = 0;  // of earlier experts
  int32_t blocks_before = 0;
  int32_t const stride = call.num_blocks * Traits::kDispatchWarps;
  StagedTokens staged;
  int32_t const warp = threadIdx.x / 32 - Traits::kFirstDispatchWarp;
  for (int32_t i = call.block * Traits::kDispatchWarps + warp;; i += stride) {
    while (expert < per_rank && i >= rows_before + static_cast<int32_t>(shared.rows[expert])) {
      rows_before += shared.rows[expert];
      blocks_before += ceil_div<int32_t>(shared.rows[expert], Traits::kBlockM);
      source_before += source_rows;
      ++expert;
      source_rows = counts && expert < per_rank ? __ldcg(counts + expert) : 0;
    }
    if (expert == per_rank) return;
    uint64_t const start_ns = Tracer<kTrace>::now();
    int32_t const row = i - rows_before;
    int32_t const block = blocks_before + row / Traits::kBlockM;
    RowSource const from = row_source(plan.world, (rank + 1) % plan.world, row, [&](int32_t s) {
      return __shfl_sync(0xffffffffu, source_rows, s);
    });
    uint32_t const list_begin = __shfl_sync(0xffffffffu, source_before, from.source);
    uint32_t const route =
        __ldcg(own.routes(plan, layout, call.bank, from.source) + list_begin + from.index);
    int32_t const token = static_cast<int32_t>(route) / plan.topk;
    char const* const src =
        from.source == rank
            ? reinterpret_cast<char const*>(params.x + int64_t{1} * token * plan.hidden)
            : params.view(from.source).token<char>(plan, layout, 0) +
                  int64_t{1} * token * row_bytes;
    if (block >= plan.x_ring_blocks) {
      WaitSite const site{Phase::kDispatchRows, -1, call.epoch, linear1_target};
      uint32_t const* const word = linear1_done + block - plan.x_ring_blocks;
      if (!wait_until(params.workspace, site, [&]() -> uint64_t { return ld_acquire_gpu(word); })) {
        return;
      }
    }
    if (!staged.wait(params, call, from.source, token)) return;
    int32_t const in_block = row % Traits::kBlockM;
    char* const dst =
        own.x_block<char>(plan, layout, 0) +
        (int64_t{1} * (block % plan.x_ring_blocks) * Traits::kBlockM + in_block) * row_bytes;
    copy_row(src, dst, row_bytes, lane);
    if (lane == 0) own.origins(plan, layout, block)[in_block] = pack_origin(from.source, route);
    __syncwarp();
    if (lane == 0) red_add_release_gpu(arrived + block, 1);
    tracer.add(TraceKind::kPull, int64_t{block} << 24 | in_block, start_ns, 0, 0, 0, 0);
  }
}

}  // namespace xstage
