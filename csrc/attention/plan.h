// The plan of every attention and All-to-All operator: integers only, as they travel from Python.
//
// What the user means (scale, causal, key segments) is an argument of the operator. What the ranks
// must agree on, and how the kernel is launched, is here. Field list: XS_ATTENTION_FIELDS, then
// three arrays of kMaxRanks integers, zero beyond `world`: rows_, kv_rows_, heads_.
#pragma once

#include <cstdint>

#include "common/workspace.h"

namespace xstage {

enum class A2aDirection : int64_t { kToHeads = 0, kToSequence = 1 };
enum class TileOrder : int64_t { kOwnLast = 0, kNatural = 1, kLongestFirst = 2 };
enum class StorePath : int64_t { kTensor = 0, kBulk = 1, kVector = 2 };
enum class Completion : int64_t { kEndOfCall = 0, kEveryTile = 1 };

// name, min, max, meaning. A launch field of 0 leaves the choice to the kernel.
#define XS_ATTENTION_FIELDS(X)                                                                  \
  X(world, 1, kMaxRanks, "ranks in the group")                                                  \
  X(kv_group, 1, 65536, "query heads per key head, over the whole model")                       \
  X(num_query, 0, 16,                                                                           \
    "ulysses_a2a: the first num_query tensors have query rows and heads, the others key ones")  \
  X(direction, 0, 1, "ulysses_a2a: 0 from sequence shards to heads, 1 from heads to shards")    \
  X(slots, 1, kMaxSlots, "results that the ring holds")                                         \
  X(block_m, 0, 1024, "query rows per tile")                                                    \
  X(block_n, 0, 1024, "keys per step of the main loop")                                         \
  X(num_sms, 0, 1024, "SMs that the kernel takes")                                              \
  X(tile_order, 0, 2, "0 peers' tiles first and own last, 1 as in memory, 2 longest first")     \
  X(store_path, 0, 2, "0 tensor (TMA) stores, 1 bulk copies, 2 16-byte stores from registers")  \
  X(slice_bytes, 0, 65536, "bytes of a finished tile per paced slice; 0 stores it at once")     \
  X(slice_steps, 0, 1024, "steps of the next main loop between two slices")                     \
  X(completion, 0, 1, "0 waits for visibility at the end, 1 after every tile (counterfactual)") \
  X(row_pad, 0, 4096, "ulysses_a2a to shards: bytes between the rows of a result, in 16s")

struct AttentionPlan {
#define X(name, min, max, meaning) int64_t name;
  XS_ATTENTION_FIELDS(X)
#undef X
  int64_t rows[kMaxRanks];     // query rows (and output rows) that each rank owns
  int64_t kv_rows[kMaxRanks];  // key rows that each rank owns before the All-to-All
  int64_t heads[kMaxRanks];    // query heads that each rank computes
};

constexpr int64_t kMaxRows = int64_t{1} << 30;
constexpr int64_t kMaxHeads = 65536;

inline int64_t num_attention_fields() {
  int64_t count = 0;
#define X(name, min, max, meaning) ++count;
  XS_ATTENTION_FIELDS(X)
#undef X
  return count + 3 * kMaxRanks;
}

inline AttentionPlan read_attention_plan(std::vector<int64_t> const& words) {
  WireReader reader(words, WireKind::kA2aPlan, "plan", num_attention_fields());
  AttentionPlan plan{};
#define X(name, min, max, meaning) plan.name = reader.next(#name, min, max);
  XS_ATTENTION_FIELDS(X)
#undef X
  int64_t const limits[] = {kMaxRows, kMaxRows, kMaxHeads};
  char const* const names[] = {"rows", "kv_rows", "heads"};
  int64_t* const arrays[] = {plan.rows, plan.kv_rows, plan.heads};
  for (int a = 0; a < 3; ++a) {
    int64_t total = 0;
    for (int64_t r = 0; r < kMaxRanks; ++r) {
      total += arrays[a][r] = reader.next(names[a], 0, r < plan.world ? limits[a] : 0);
    }
    XS_CHECK(total <= limits[a], "xstage: plan: ", names[a], ": expected at most ", limits[a],
             " in all, got ", total);
  }
  return plan;
}

}  // namespace xstage
