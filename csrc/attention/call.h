// One call of an operator that stores into a ring of output slots: what it needs to know of its
// ranks, read and checked from the wire messages. Host only; CPU and CUDA alike.
#pragma once

#include "common/slots.h"
#include "problem.h"

namespace xstage {

// One rank that this process plays: the calling one, or each of a virtual group.
struct RankCall {
  Workspace workspace;
  TakenSlot taken;

  int rank() const { return static_cast<int>(workspace.rank); }
};

struct RingCall {
  AttentionPlan plan;
  AttentionLayout layout;
  SlotRing ring;
  std::vector<RankCall> ranks;

  // Start of a rank's slot, in memory that this process has mapped.
  char* slot(RankCall const& from, int of_rank) const {
    return from.workspace.region(of_rank, ring.offset(from.taken.slot));
  }
  int slot_index() const { return ranks.front().taken.slot; }

  // What grant_slot announces. Virtual ranks take the same slots; one that is free only on some of
  // them is announced by none.
  uint32_t free_slots() const {
    uint32_t free = ~0u;
    for (RankCall const& rank : ranks) free &= rank.taken.free_slots;
    return free;
  }

  std::vector<Workspace> workspaces() const {
    std::vector<Workspace> all;
    for (RankCall const& rank : ranks) all.push_back(rank.workspace);
    return all;
  }
};

// Reads plan and descriptors. Slots are taken later (take_slots), when nothing can be refused any
// more: a refused call leaves the books as they were.
inline RingCall open_call(char const* op, std::vector<int64_t> const& plan_words,
                          std::vector<Workspace> const& workspaces, MemoryKind memory) {
  RingCall call{};
  call.plan = read_attention_plan(plan_words);
  call.layout = make_layout(call.plan);
  XS_CHECK(call.layout.heads.total() % call.plan.kv_group == 0, "xstage.", op,
           ": plan: expected query heads in whole groups of ", call.plan.kv_group, ", got ",
           call.layout.heads.total());
  for (Workspace const& workspace : workspaces) {
    XS_CHECK(workspace.world == call.plan.world, "xstage.", op, ": plan: made for ",
             call.plan.world, " ranks, but the workspace has ", workspace.world);
    check_memory(op, workspace, memory);
    call.ranks.push_back({workspace, {}});
  }
  call.ring = make_ring(workspaces.front().region_bytes, call.plan.slots);
  return call;
}

inline void take_slots(char const* op, RingCall& call, int64_t slot_bytes, bool capturing) {
  XS_CHECK(slot_bytes <= call.ring.stride, "xstage.", op, ": workspace: a result needs ",
           slot_bytes, " bytes, but a slot has ", call.ring.stride, " (region of ",
           call.ranks.front().workspace.region_bytes, " bytes in ", call.plan.slots,
           " slots); prepare the operator for these shapes");
  for (RankCall& rank : call.ranks) {
    rank.taken = take_slot(op, rank.workspace, call.plan.slots, capturing);
  }
}

// What ranks must agree on in a call; rides in its signal.
inline void mix_call(RingCall& call, std::vector<int64_t> const& plan_words,
                     std::vector<int64_t> const& facts) {
  for (RankCall& rank : call.ranks) {
    for (int64_t word : plan_words) mix_digest(rank.workspace, word);
    for (int64_t fact : facts) mix_digest(rank.workspace, fact);
    mix_digest(rank.workspace, rank.taken.slot);
  }
}

// Bytes of the largest output of any rank.
inline int64_t output_slot_bytes(AttentionLayout const& layout, int64_t batch, int64_t row_bytes) {
  return round_up(batch * layout.rows.largest() * layout.heads.total() * row_bytes, kSlotAlign);
}

inline void check_float_dtype(char const* op, char const* name, Tensor const& tensor) {
  ScalarType const type = tensor.scalar_type();
  XS_CHECK(type == ScalarType::BFloat16 || type == ScalarType::Half || type == ScalarType::Float,
           "xstage.", op, ": ", name, ": expected bfloat16, float16 or float32, got ",
           dtype_name(type));
}

}  // namespace xstage
