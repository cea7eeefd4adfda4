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

// The lists of all owners in turns, 32 choices at a time, shared out among the blocks. A group of tokens
// is announced behind the first loads of the next, when most of its stores have arrived.
__device__ __forceinline__ void push_tokens(MegaMoeParams const& params, CallState const& call,
                                            MegaMoeShared const& shared) {
  MegaMoePlan const& plan = params.plan;
  int const lane = threadIdx.x % 32;
  int32_t const rank = static_cast<int32_t>(params.workspace.rank);
  MegaMoeView const own = params.view(rank);
  int32_t const peers = plan.world - 1;
  int32_t const row_bytes = 2 * plan.hidden;
  int const most = max_of(1, kGroupBytes / row_bytes);
  int32_t longest = 0;  // list of a peer
  for (int32_t i = 1; i <= peers; ++i) {
    longest = max_of(longest, static_cast<int32_t>(shared.sent[(rank + i) % plan.world]));
  }
  uint64_t* pending = nullptr;  // this lane's token of the group before is here
  auto const announce = [&] {
    if (!__any_sync(0xffffffffu, pending != nullptr)) return;
    __syncwarp();
    if (pending != nullptr) st_release_sys(pending, call.epoch);
    pending = nullptr;
  };
  for (int32_t batch = call.block; batch < peers * ceil_div(longest, 32);
       batch += call.num_blocks) {
    int32_t const distance = peers - batch % peers;  // the next rank first
    int32_t const owner = (rank + plan.world - distance) % plan.world;
    int32_t const position = batch / peers * 32 + lane;
    uint64_t* here = nullptr;
    char const* from = nullptr;
    char* to = nullptr;
    if (position < static_cast<int32_t>(shared.sent[owner])) {
      int32_t const route = __ldcg(own.send_routes(plan, params.layout, owner) + position);
      int32_t const token = route / plan.topk;
      int32_t const local = expert_of(params, route) - owner * plan.experts_per_rank();
      if (sends_token(params, owner, int64_t{1} * token * plan.topk, route % plan.topk, local)) {
        int64_t const place = plan.token_place(distance, plan.token_set(local), token);
        MegaMoeView const there = params.view(owner);
        here = there.token_here(params.layout, place);
        from = reinterpret_cast<char const*>(params.x) + int64_t{1} * token * row_bytes;
        to = there.token<char>(plan, params.layout, 0) + place * row_bytes;
        bulk_prefetch_l2(from, row_bytes);
      }
    }
    for (uint32_t left = __ballot_sync(0xffffffffu, here != nullptr); left != 0;) {
      uint32_t group = 0;
      for (int i = 0; i < most && left != 0; ++i, left &= left - 1) group |= left & -left;
      move_rows(group, from, to, row_bytes, announce);
      pending = group >> lane & 1 ? here : nullptr;
    }
  }
  announce();
}

}  // namespace xstage
