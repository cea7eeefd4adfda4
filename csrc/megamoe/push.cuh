// The push (plan.dispatch = 1), the sources' part: tokens of this rank into the memory of the ranks that
// own their experts. A token travels once to each owner, however many of its experts live there (once
// per set of an owner's experts, plan.token_sets); the owner copies it to where they need it
// (unpack.cuh). So what dispatch puts on the link is a row per token and owner, not per choice.
//
// Tokens go in the order in which an owner needs them: its lists are walked by expert, and a token is
// sent at the first of its choices. Every token has a place of its own at the owner, so a source never
// waits.
//
// Roles: the last dispatch warp of every block, beside the tiles.
// Global protocol:
//   kTokenHere[place] (the owner's)  st.release.sys per token, for a group at a time -> acquire.sys by
//                                    the owner's dispatch warps
#pragma once

#include "dispatch.cuh"
#include "params.h"
#include "pipeline.cuh"
#include "rows.cuh"

namespace xstage {

// Whether a choice is the one at which its token is sent to the owner: the first among its choices of
// the same set, by expert.
__device__ __forceinline__ bool sends_token(MegaMoeParams const& params, int32_t owner,
                                            int64_t first_choice, int32_t slot, int32_t local) {
  MegaMoePlan const& plan = params.plan;
  int32_t const base = owner * plan.experts_per_rank();
  int32_t const set = plan.token_set(local);
  bool first = true;
  for (int32_t s = 0; s < plan.topk; ++s) {
    int32_t const other = expert_of(params, first_choice + s) - base;
    if (other < 0 || other > local || plan.token_set(other) != set) continue;
    if (other < local || s < slot) first = false;
  }
  return first;
}

#ifndef FIRST_ROUND
#define FIRST_ROUND 4
#endif
constexpr int kFirstRound = FIRST_ROUND;

// The next rows of `left`, as many as are sent between two announcements.
__device__ __forceinline__ uint32_t take_group(uint32_t& left, int most) {
  uint32_t group = 0;
  for (int i = 0; i < most && left != 0; ++i, left &= left - 1) group |= left & -left;
  return group;
}

// A group of tokens is announced behind the first loads of the next, when most of its stores have
// arrived.
__device__ __forceinline__ void push_tokens(MegaMoeParams const& params, CallState const& call,
                                            MegaMoeShared const& shared) {
  MegaMoePlan const& plan = params.plan;
  int const lane = threadIdx.x % 32;
  int32_t const rank = static_cast<int32_t>(params.workspace.rank);
  MegaMoeView const own = params.view(rank);
  int32_t const row_bytes = 2 * plan.hidden;
  int const most = max_of(1, kGroupBytes / row_bytes);
  int32_t longest = 0;  // list of a peer
  for (int32_t i = 1; i < plan.world; ++i) {
    longest = max_of(longest, static_cast<int32_t>(shared.sent[(rank + i) % plan.world]));
  }
  char const* const x = reinterpret_cast<char const*>(params.x);
  auto const row_of = [&](auto* base, int32_t row) { return base + int64_t{row} * row_bytes; };
  int32_t pending_owner = 0;
  int32_t pending = -1;  // place of this lane's token in the group before
  auto const announce = [&] {
    if (!__any_sync(0xffffffffu, pending >= 0)) return;
    __syncwarp();
    if (pending >= 0) {
      st_release_sys(params.view(pending_owner).token_here(params.layout, pending), call.epoch);
    }
    pending = -1;
  };
  bool const sender = threadIdx.x >= 32 * (MegaMoeTraits::kFirstDispatchWarp + 1);
  int32_t const all = MegaMoeTraits::kDispatchWarps * call.num_blocks;
  // Positions of every list, one per lane: all warps share out the first, then only the senders.
  int32_t begin = call.block + (sender ? 0 : call.num_blocks);
  int32_t stride = all;
  int32_t lanes = kFirstRound;
  while (begin < longest) {
    for (int32_t distance = plan.world - 1; distance > 0; --distance) {  // the next rank first
      int32_t const owner = (rank + plan.world - distance) % plan.world;
      int32_t const position = begin + lane * stride;
      int32_t token = 0;
      int32_t place = -1;  // at the owner
      if (lane < lanes && position < static_cast<int32_t>(shared.sent[owner])) {
        int32_t const route = __ldcg(own.send_routes(plan, params.layout, owner) + position);
        token = route / plan.topk;
        int32_t const local = expert_of(params, route) - owner * plan.experts_per_rank();
        if (sends_token(params, owner, int64_t{1} * token * plan.topk, route % plan.topk, local)) {
          place = plan.token_place(distance, plan.token_set(local), token);
        }
      }
      char* const places = params.view(owner).token<char>(plan, params.layout, 0);
      uint32_t left = __ballot_sync(0xffffffffu, place >= 0);
      uint32_t next = take_group(left, most);
      if (next >> lane & 1) bulk_prefetch_l2(row_of(x, token), row_bytes);
      while (next != 0) {
        uint32_t const group = next;
        next = take_group(left, most);
        if (next >> lane & 1) bulk_prefetch_l2(row_of(x, token), row_bytes);
        move_rows(
            group, row_bytes, [&](int from) { return row_of(x, of_lane(token, from)); },
            [&](int from) { return row_of(places, of_lane(place, from)); }, announce);
        pending = group >> lane & 1 ? place : -1;
        pending_owner = owner;
      }
    }
    if (!sender) break;
    begin = stride == all ? kFirstRound * all + call.block : begin + 32 * call.num_blocks;
    stride = call.num_blocks;
    lanes = 32;
  }
  announce();
}

}  // namespace xstage
