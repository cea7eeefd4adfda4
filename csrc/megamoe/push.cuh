// The push (plan.dispatch = 1), the sources' part: tokens of this rank into the memory of the ranks
// that own their experts. A token travels once to each owner, however many of its experts live
// there (once per set of an owner's experts, plan.token_sets); the owner copies it to where they
// need it (receive.cuh). So what dispatch puts on the link is a row per token and owner, not per
// choice.
//
// Tokens go in the order in which an owner needs them: its lists are walked by expert, and a token
// is sent at the first of its choices. Every token has a place of its own at the owner, so a source
// never waits.
//
// Roles: math warps 4 to 7, before their first tile: the first choices of every owner's list; the
// last dispatch warp, beside the tiles: the others.
// Global protocol:
//   kSendRoutes (this rank's)        whole when its own kDispatchSignals was seen (dispatch.cuh)
//   kTokenHere[place] (the owner's)  st.release.sys per token, for a group at a time -> acquire.sys
//                                    by the owner's dispatch warps
#pragma once

#include "dispatch.cuh"
#include "params.h"
#include "pipeline.cuh"
#include "rows.cuh"

namespace xstage {

// Whether a choice is the one at which its token is sent to the owner: the first among its choices
// of the same set, by expert.
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

// The next rows of `left`, as many as are sent between two announcements.
__device__ __forceinline__ uint32_t take_group(uint32_t& left, int most) {
  uint32_t group = 0;
  for (int i = 0; i < most && left != 0; ++i, left &= left - 1) group |= left & -left;
  return group;
}

// One warp's sending. A group of tokens is announced behind the first loads of the next, when most
// of its stores have arrived; the next one's rows of x are fetched into the L2 before.
struct TokenSender {
  MegaMoeParams const& params;
  CallState const& call;
  int32_t row_bytes;
  int32_t owner = 0;
  int32_t pending = -1;  // place of this lane's token in the group before, at that owner

  __device__ __forceinline__ TokenSender(MegaMoeParams const& p, CallState const& c)
      : params(p), call(c), row_bytes(2 * p.plan.hidden) {}

  __device__ __forceinline__ void announce() {
    if (!__any_sync(0xffffffffu, pending >= 0)) return;
    __syncwarp();
    if (pending >= 0) {
      st_release_sys(params.view(owner).token_here(params.layout, pending), call.epoch);
    }
    pending = -1;
  }

  // The tokens that choices of the list for `to` send; `position`: this lane's, or behind its end.
  __device__ __forceinline__ void send(int32_t to, int32_t position, int32_t end) {
    MegaMoePlan const& plan = params.plan;
    int const lane = threadIdx.x % 32;
    int32_t const rank = static_cast<int32_t>(params.workspace.rank);
    int32_t const distance = (rank + plan.world - to) % plan.world;
    int const most = max_of(1, kGroupBytes / row_bytes);
    int32_t token = 0;
    int32_t place = -1;  // at the owner
    if (position < end) {
      int32_t const route =
          __ldcg(params.view(rank).send_routes(plan, params.layout, to) + position);
      token = route / plan.topk;
      int32_t const local = expert_of(params, route) - to * plan.experts_per_rank();
      if (sends_token(params, to, int64_t{1} * token * plan.topk, route % plan.topk, local)) {
        place = plan.token_place(distance, plan.token_set(local), token);
      }
    }
    char const* const x = reinterpret_cast<char const*>(params.x);
    char* const places = params.view(to).token<char>(plan, params.layout, 0);
    auto const row_of = [&](auto* base, int32_t row) { return base + int64_t{row} * row_bytes; };
    uint32_t left = __ballot_sync(0xffffffffu, place >= 0);
    uint32_t next = take_group(left, most);
    if (next >> lane & 1) bulk_prefetch_l2(row_of(x, token), row_bytes);
    while (next != 0) {
      uint32_t const group = next;
      next = take_group(left, most);
      if (next >> lane & 1) bulk_prefetch_l2(row_of(x, token), row_bytes);
      move_rows(
          group, row_bytes, [&](int from) { return row_of(x, of_lane(token, from)); },
          [&](int from) { return row_of(places, of_lane(place, from)); }, [&] { announce(); });
      pending = group >> lane & 1 ? place : -1;
      owner = to;
    }
  }
};

constexpr int32_t kFirstSenders = 4;  // math warps of a block that send before their first tile
constexpr int32_t kFirstChoices = 2;  // choices that each of them walks

// How many of these warps serve one owner.
__device__ __forceinline__ int32_t first_senders(MegaMoePlan const& plan, CallState const& call) {
  return kFirstSenders * call.num_blocks / (plan.world - 1);
}

// The math warps, before their first tile: the tokens that owners need first. With all of them at
// once the link would be shared by too many, and the first tokens would come with the last.
__device__ __forceinline__ void push_first_tokens(MegaMoeParams const& params,
                                                  CallState const& call,
                                                  MegaMoeShared const& shared) {
  int32_t const peers = params.plan.world - 1;
  int32_t const index = (threadIdx.x / 32 - 4) * call.num_blocks + call.block;
  int32_t const stride = first_senders(params.plan, call);
  if (index >= stride * peers) return;
  int32_t const owner =
      (static_cast<int32_t>(params.workspace.rank) + 1 + index % peers) % params.plan.world;
  TokenSender sender(params, call);
  int32_t const lane = threadIdx.x % 32;
  sender.send(owner, index / peers + lane * stride, lane < kFirstChoices ? shared.sent[owner] : 0);
  sender.announce();
}

// The last dispatch warp of every block: the others, in the order of the lists.
__device__ __forceinline__ void push_tokens(MegaMoeParams const& params, CallState const& call,
                                            MegaMoeShared const& shared) {
  MegaMoePlan const& plan = params.plan;
  if (plan.world == 1) return;
  int32_t const rank = static_cast<int32_t>(params.workspace.rank);
  int32_t longest = 0;
  for (int32_t i = 1; i < plan.world; ++i) {
    longest = max_of(longest, static_cast<int32_t>(shared.sent[(rank + i) % plan.world]));
  }
  TokenSender sender(params, call);
  for (int32_t begin = kFirstChoices * first_senders(plan, call) + call.block; begin < longest;
       begin += 32 * call.num_blocks) {
    int32_t const position = begin + static_cast<int32_t>(threadIdx.x % 32) * call.num_blocks;
    for (int32_t i = 1; i < plan.world; ++i) {
      int32_t const owner = (rank + i) % plan.world;
      sender.send(owner, position, static_cast<int32_t>(shared.sent[owner]));
    }
  }
  sender.announce();
}

}  // namespace xstage
