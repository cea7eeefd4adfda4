// The plan of a megamoe call: integers only, the same on every rank, decided before launch.
//
// Units. An m-block is `block_m` rows of one expert. A tile is one m-block times `block_n` columns
// of Linear-1 (gate and up columns, block_n / 2 of each) or of Linear-2. Blocks of a rank's experts
// are numbered through in expert order, without gaps: expert e owns ceil(count_e / block_m) of
// them.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/wire.h"

namespace xstage {

// X(name, min, max, meaning). C++ owns this list; Python compares its own with it at import.
#define XS_MEGAMOE_FIELDS(X)                                                                    \
  X(world, 1, 8, "ranks of the group")                                                          \
  X(num_experts, 1, 1024, "experts of the whole group; a multiple of world")                    \
  X(topk, 1, 16, "experts per token")                                                           \
  X(hidden, 64, 65536, "width of a token in elements; a multiple of 64")                        \
  X(intermediate, 64, 65536, "width between the two linears in elements; a multiple of 64")     \
  X(max_tokens, 1, 1048576, "most tokens that a rank may bring to a call")                      \
  X(block_m, 16, 256, "rows of a tile; a multiple of 16")                                       \
  X(block_n, 32, 256, "columns of a tile; a multiple of 32")                                    \
  X(cluster_size, 1, 2, "CTAs that share operands of adjacent tiles")                           \
  X(num_sms, 1, 1024, "CTAs of the persistent grid; a multiple of cluster_size")                \
  X(schedule, 0, 1, "0 Expert-Wave, 1 interleaved")                                             \
  X(group_blocks, 1, 65536, "m-blocks of one expert that are scheduled together")               \
  X(lead_blocks, 0, 1048576, "interleaved: m-blocks that Linear-1 keeps ahead of Linear-2")     \
  X(wave_blocks, 1, 1048576, "Expert-Wave: m-blocks of a wave; whole experts where they fit")   \
  X(mix, 0, 1, "interleaved: 0 a Linear-2 group before a Linear-1 group, 1 their tiles mixed")  \
  X(x_ring_blocks, 1, 1048576, "m-blocks of received tokens held at a time")                    \
  X(h_ring_blocks, 1, 1048576, "m-blocks of Linear-1 results held at a time")                   \
  X(store, 0, 2, "Linear-2 results leave as: 0 plain stores, 1 bulk burst, 2 bulk, paced")      \
  X(slice_rows, 1, 256, "rows that a paced storer issues per step")                             \
  X(weight_layout, 0, 2, "rows of w13: 0 gate then up, 1 up then gate, 2 gate and up in turns") \
  X(dispatch, 0, 1, "0 owners of experts pull rows, 1 sources push tokens, once per owner")     \
  X(token_sets, 1, 128, "pushed: sets of an owner's experts that a token is sent to once each")

enum MegaMoeSchedule : int32_t { kExpertWave = 0, kInterleaved = 1 };
enum MegaMoeStore : int32_t { kPlainStores = 0, kBulkBurst = 1, kBulkPaced = 2 };
enum MegaMoeWeights : int32_t { kGateUp = 0, kUpGate = 1, kGateUpInTurns = 2 };
enum MegaMoeDispatch : int32_t { kPull = 0, kPush = 1 };

constexpr int32_t kDispatchWarps = 2;      // of an SM: they move rows of tokens
constexpr int32_t kMaxLocalExperts = 128;  // of a rank: an SM keeps the rows of each

// The largest value of every field.
struct MegaMoeLimits {
#define X(name, min, max, meaning) static constexpr int64_t name = max;
  XS_MEGAMOE_FIELDS(X)
#undef X
};

static_assert((MegaMoeLimits::world - 1) * MegaMoeLimits::token_sets * MegaMoeLimits::max_tokens <
                  int64_t{1} << 31,
              "warps hold a token's place in 32 bits");

struct MegaMoePlan {
#define X(name, min, max, meaning) int32_t name;
  XS_MEGAMOE_FIELDS(X)
#undef X

  XS_HD int32_t experts_per_rank() const { return num_experts / world; }
  XS_HD int32_t num_clusters() const { return num_sms / cluster_size; }
  // A Linear-1 tile makes block_n / 2 columns of the activation.
  XS_HD int32_t linear1_tiles() const { return ceil_div(intermediate, block_n / 2); }
  XS_HD int32_t linear2_tiles() const { return ceil_div(hidden, block_n); }
  // Rows that one rank can receive, and the blocks that they can fill, whatever the routing.
  XS_HD int64_t max_rows() const { return int64_t{1} * world * max_tokens * topk; }
  XS_HD int64_t max_blocks() const {
    return min_of(max_rows() / block_m + experts_per_rank(), max_rows());
  }
  // Linear-1 of block b writes where Linear-2 of block b - h_ring_blocks read; that tile must come
  // earlier in the schedule. This is the largest distance that the schedule keeps.
  XS_HD int32_t min_h_ring_blocks() const {
    return schedule == kExpertWave ? wave_blocks : lead_blocks + 2 * group_blocks;
  }
  // Which set of an owner's experts a local expert belongs to.
  XS_HD int32_t token_set(int32_t expert) const { return expert * token_sets / experts_per_rank(); }
  // Places in kTokens: of all tokens that peers may push here, or of this rank's own for peers to pull.
  XS_HD int64_t token_places() const {
    return dispatch == kPush ? int64_t{1} * (world - 1) * token_sets * max_tokens : max_tokens;
  }
  // Pushed: the place of a token at an owner, `distance` (1 to world - 1) ranks before its source.
  XS_HD int64_t token_place(int32_t distance, int32_t set, int32_t token) const {
    return (int64_t{1} * (distance - 1) * token_sets + set) * max_tokens + token;
  }
  // Tokens of a group must fit together: the CTAs of a cluster work on two blocks of it at once.
  XS_HD int32_t min_x_ring_blocks() const { return group_blocks; }
};

constexpr int64_t kNumMegaMoeFields = []() constexpr {
  int64_t count = 0;
#define X(name, min, max, meaning) ++count;
  XS_MEGAMOE_FIELDS(X)
#undef X
  return count;
}();

// What no single field can say.
inline void check_plan(MegaMoePlan const& plan) {
  char const* const who = "xstage: megamoe plan: ";
  XS_CHECK(plan.num_experts % plan.world == 0, who, "num_experts: expected a multiple of world (",
           plan.world, "), got ", plan.num_experts);
  XS_CHECK(plan.experts_per_rank() <= kMaxLocalExperts, who, "num_experts: expected at most ",
           kMaxLocalExperts, " per rank, got ", plan.experts_per_rank());
  XS_CHECK(plan.hidden % 64 == 0, who, "hidden: expected a multiple of 64, got ", plan.hidden);
  XS_CHECK(plan.intermediate % 64 == 0, who, "intermediate: expected a multiple of 64, got ",
           plan.intermediate);
  XS_CHECK(plan.block_m % 16 == 0, who, "block_m: expected a multiple of 16, got ", plan.block_m);
  XS_CHECK(plan.block_n % 32 == 0, who, "block_n: expected a multiple of 32, got ", plan.block_n);
  XS_CHECK(plan.num_sms % plan.cluster_size == 0, who, "num_sms: expected a multiple of ",
           plan.cluster_size, " (cluster_size), got ", plan.num_sms);
  XS_CHECK(plan.token_sets <= plan.experts_per_rank(), who, "token_sets: expected at most ",
           plan.experts_per_rank(), " (experts per rank), got ", plan.token_sets);
  XS_CHECK(plan.h_ring_blocks >= plan.min_h_ring_blocks(), who, "h_ring_blocks: expected at least ",
           plan.min_h_ring_blocks(), " for this schedule, got ", plan.h_ring_blocks);
  XS_CHECK(plan.x_ring_blocks >= plan.min_x_ring_blocks(), who, "x_ring_blocks: expected at least ",
           plan.min_x_ring_blocks(), " (group_blocks), got ", plan.x_ring_blocks);
}

inline MegaMoePlan read_megamoe_plan(std::vector<int64_t> const& words) {
  WireReader reader(words, WireKind::kMegaMoePlan, "megamoe plan", kNumMegaMoeFields);
  MegaMoePlan plan{};
#define X(name, min, max, meaning) plan.name = static_cast<int32_t>(reader.next(#name, min, max));
  XS_MEGAMOE_FIELDS(X)
#undef X
  check_plan(plan);
  return plan;
}

}  // namespace xstage
