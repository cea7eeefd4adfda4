// Dispatch: count and list the rows for every expert and tell the owners. Where they pull the rows
// (receive.cuh), x is copied to where they can read it; where tokens are pushed (push.cuh), this rank
// keeps the lists too.
//
// Roles: the prologue is run by all warps of every block, before the tiles; segments of x are
// copied by the math warps before their first tile. Shared memory: counts and positions per expert,
// in the memory of the stages.
// Global protocol (bank = epoch mod 2, all words are private to this rank unless said otherwise):
//   kSendCounts    red, every block -> grid barrier kCountsAdded -> read by every block
//   kSendCursors   atomics of every block
//   kRoutes, kCounts (of the owners), kSendRoutes, kTokens (if x is one segment; read by peers)
//                  -> grid barrier kRoutesStored; its last arrival stores kDispatchSignals of every
//                  rank, this one too (fence.sys, relaxed)
//   kDispatchSignals[source] -> acquire.sys by every block; of this rank: kSendRoutes are whole
//   kSegmentsStaged -> its last arrival stores kStaged[source][segment] of every owner (fence.sys,
//                  relaxed)
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

// The math warps, before their first tile: copy x in segments and tell the owners about each. The
// two warpgroups take segments in turn, so that one copies while the other waits for its stores.
__device__ __forceinline__ void stage_segments(MegaMoeParams const& params, CallState const& call) {
  MegaMoePlan const& plan = params.plan;
  int32_t const rank = static_cast<int32_t>(params.workspace.rank);
  int const group = threadIdx.x / 128 - 1;
  int const thread = threadIdx.x % 128;
  int32_t const tokens = segment_tokens(plan);
  uint32_t* const copied =
      params.view(rank).counter(params.layout, call.bank, MegaMoeCounter::kSegmentsStaged);
  for (int32_t s = group; s < num_segments(plan); s += 2) {
    stage_tokens(params, min_of(s * tokens, call.num_tokens),
                 min_of((s + 1) * tokens, call.num_tokens),
                 {call.block * 128 + thread, call.num_blocks * 128});
    warpgroup_all(true);  // all have copied
    if (thread != 0) continue;
    uint32_t const earlier = atom_add_acq_rel_gpu(copied + s, 1);
    if (earlier + 1 != static_cast<uint32_t>(call.num_blocks)) continue;
    fence_acq_rel_sys();  // makes the stores a release of what all blocks have copied
    for (int32_t i = 1; i < plan.world; ++i) {
      MegaMoeView const owner = params.view((rank + i) % plan.world);
      st_relaxed_sys(owner.staged(params.layout, rank, s), call.epoch);
    }
  }
}

// Where this block's choices go in the lists, by expert; how many rows go to each owner. Block 0
// tells the owners how many rows of each expert come.
__device__ __forceinline__ void place_routes(MegaMoeParams const& params, CallState const& call,
                                             MegaMoeShared& shared) {
  MegaMoePlan const& plan = params.plan;
  int32_t const rank = static_cast<int32_t>(params.workspace.rank);
  MegaMoeView const own = params.view(rank);
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
      uint32_t const sum = warp_inclusive_sum(count);
      if (valid) {
        uint32_t const mine = shared.routing.counts[expert];
        uint32_t const taken =
            mine ? atomicAdd(cursors + group * plan.num_experts + expert, mine) : 0;
        shared.routing.positions[expert] = before + sum - count + earlier + taken;
        if (call.block == 0) {
          params.view(owner).counts(plan, params.layout, call.bank, rank)[first + lane] = count;
        }
      }
      before += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0) shared.sent[owner] = before;
  }
}

// Lists this block's choices in the owners' kRoutes; where tokens are pushed, for this rank too.
// Within an expert the order does not matter: rows are independent, and results come back by slot.
__device__ __forceinline__ void list_routes(MegaMoeParams const& params, CallState const& call,
                                            MegaMoeShared& shared, int64_t begin, int64_t end) {
  MegaMoePlan const& plan = params.plan;
  int32_t const rank = static_cast<int32_t>(params.workspace.rank);
  int const per_rank = plan.experts_per_rank();
  for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
    int32_t const expert = expert_of(params, i);
    if (expert < 0) continue;
    uint32_t const position = atomicAdd(&shared.routing.positions[expert], 1u);
    int32_t const owner = expert / per_rank;
    uint32_t const route = static_cast<uint32_t>(i);
    params.view(owner).routes(plan, params.layout, call.bank, rank)[position] = route;
    if (plan.dispatch == kPush) {
      params.view(rank).send_routes(plan, params.layout, owner)[position] = route;
    }
  }
}

// One thread: what came before is in place at every owner. The fence makes the stores a release.
__device__ __forceinline__ void signal_owners(MegaMoeParams const& params, CallState const& call) {
  Workspace const& workspace = params.workspace;
  fence_acq_rel_sys();
  for (int64_t i = 1; i <= workspace.world; ++i) {
    int64_t const owner = (workspace.rank + i) % workspace.world;
    st_relaxed_sys(
        params.view(owner).dispatch_signal(params.layout, static_cast<int32_t>(workspace.rank)),
        workspace.signal(call.epoch));
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
      uint64_t seen = 0;
      ok = wait_until(workspace, site, [&] { return signal_epoch(seen = ld_acquire_sys(word)); });
      // No source can be ahead: its next call needs this rank's signal of this call.
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

  // Only peers pull from there: rows of this rank's own tokens come from x itself.
  if (plan.world > 1 && plan.dispatch != kPush && num_segments(plan) == 1) {
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
  place_routes(params, call, shared);
  __syncthreads();
  list_routes(params, call, shared, begin, end);
  // The stages' memory was used by ordinary accesses; the partner's loads may follow our next
  // signal.
  fence_proxy_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    fence_acq_rel_sys();
    uint32_t const earlier = atom_add_acq_rel_gpu(barriers + kRoutesStored, 1);
    // Cumulative: what the other blocks released above comes before the signals.
    if (earlier + 1 == static_cast<uint32_t>(call.num_blocks)) signal_owners(params, call);
  }
  return gather_counts(params, call, shared);
}

}  // namespace xstage
