// Where everything lies and in which order tiles run: one code for kernels, CPU path and tests.
//
//   Partition     consecutive runs of rows or heads, one per rank, of any length (also 0)
//   HeadRange     the key heads that a rank needs; ranges overlap where ranks share a key head
//   SlotRing      the results in a rank's region, written by its peers
//   TileSchedule  index -> query tile; a tile never crosses the border between two owners
//   key_end, classify_keys   which keys a tile sees
//
// Everything here is a pure function of the plan, the shapes and the rank.
#pragma once

#include "common/host_device.h"
#include "plan.h"

namespace xstage {

// Item i belongs to the rank r with first[r] <= i < first[r + 1].
struct Partition {
  int32_t first[kMaxRanks + 1];

  XS_HD int32_t begin(int r) const { return first[r]; }
  XS_HD int32_t count(int r) const { return first[r + 1] - first[r]; }
  XS_HD int32_t total() const { return first[kMaxRanks]; }
  XS_HD int owner(int32_t item) const {
    int r = 0;
    while (r + 1 < kMaxRanks && item >= first[r + 1]) ++r;
    return r;
  }
  XS_HD int32_t largest() const {
    int32_t most = 0;
    for (int r = 0; r < kMaxRanks; ++r) most = max_of(most, count(r));
    return most;
  }
};

XS_HD Partition make_partition(int64_t const* counts) {
  Partition partition{};
  for (int r = 0; r < kMaxRanks; ++r) {
    partition.first[r + 1] = partition.first[r] + static_cast<int32_t>(counts[r]);
  }
  return partition;
}

struct HeadRange {
  int32_t first;
  int32_t count;
};

// The three partitions of a plan, and what follows from them for heads.
struct AttentionLayout {
  Partition rows;
  Partition kv_rows;
  Partition heads;
  int32_t kv_group;
  int32_t world;

  XS_HD HeadRange query_heads(int r) const { return {heads.begin(r), heads.count(r)}; }

  // Key heads that rank r's query heads read. Query head h reads key head h / kv_group.
  XS_HD HeadRange key_heads(int r) const {
    if (heads.count(r) == 0) return {0, 0};
    int32_t const first = heads.begin(r) / kv_group;
    int32_t const last = (heads.first[r + 1] - 1) / kv_group;
    return {first, last - first + 1};
  }
  XS_HD int32_t total_key_heads() const { return ceil_div(heads.total(), kv_group); }

  // A rank's first query head is the head_phase-th of its group: local query head i reads local key
  // head (i + head_phase) / kv_group.
  XS_HD int32_t head_phase(int r) const { return heads.begin(r) % kv_group; }
};

XS_HD AttentionLayout make_layout(AttentionPlan const& plan) {
  return {make_partition(plan.rows), make_partition(plan.kv_rows), make_partition(plan.heads),
          static_cast<int32_t>(plan.kv_group), static_cast<int32_t>(plan.world)};
}

// The region of an operator instance is a ring of `slots` slots. The stride depends on the region
// alone, so that calls of different shapes share one ring.
constexpr int64_t kSlotAlign = 1024;

struct SlotRing {
  int64_t stride;
  int64_t slots;

  XS_HD int64_t offset(int64_t slot) const { return slot * stride; }
};

XS_HD SlotRing make_ring(int64_t region_bytes, int64_t slots) {
  return {region_bytes / slots / kSlotAlign * kSlotAlign, slots};
}
XS_HD int64_t ring_bytes(int64_t slot_bytes, int64_t slots) {
  return slots * round_up(slot_bytes, kSlotAlign);
}

// Elements from the start of a contiguous [B, rows, heads, D] tensor.
XS_HD int64_t bshd_offset(int64_t b, int64_t row, int64_t head, int64_t rows, int64_t heads,
                          int64_t head_dim) {
  return ((b * rows + row) * heads + head) * head_dim;
}

// Which place of a round a block takes where work falls from place to place, over num_rounds rounds
// of num_blocks. Rounds go in pairs, the second backwards: who got the longest tile gets the
// shortest next. Of an odd number the first three go together: the second falls twice as steeply
// from its middle on, the third makes up for both, so that the three places of every block add up
// to the same, give or take one.
XS_HD int32_t place_in_round(int32_t round, int32_t num_rounds, int32_t block, int32_t num_blocks) {
  if (num_rounds % 2 == 1 && round < 3) {
    if (round == 0) return block;
    bool const upper = (block % 2 == 1) == (round == 1);
    int32_t const half = round == 1 ? ceil_div(num_blocks, 2) : num_blocks / 2;
    return (upper ? num_blocks : half) - 1 - block / 2;
  }
  return (round + num_rounds) % 2 == 1 ? num_blocks - 1 - block : block;
}

// A query tile: up to block_m rows of one head that one rank owns.
struct QueryTile {
  int32_t batch;
  int32_t head;       // of the rank that computes, from 0
  int32_t owner;      // rank that the output rows go to
  int32_t owner_row;  // first row in the owner's shard
  int32_t row;        // first row in the whole sequence
  int32_t num_rows;
};

// Blocks are cut at shard borders: shard j has ceil(count(j) / block_m) of them.
//
// kOwnLast: for every (batch, head) all blocks of the peers' shards, starting behind the own rank,
// so that ranks never store to the same peer at once; when all heads are done, the own blocks of
// every (batch, head): the last stores are local and the link is quiet at the end.
// kNatural: block fastest, then head, then batch. kLongestFirst: the last block of the sequence
// first, for all (batch, head), so that causal tiles come in falling order of work.
struct TileSchedule {
  Partition rows;
  int32_t blocks[kMaxRanks];  // of each shard
  int32_t block_m;
  int32_t world;
  int32_t rank;
  int32_t num_heads;    // that this rank computes
  int32_t num_groups;   // batch * num_heads
  int32_t peer_blocks;  // of all shards but the own
  TileOrder order;

  XS_HD int64_t size() const {
    return static_cast<int64_t>(num_groups) * (peer_blocks + blocks[rank]);
  }

  // The tile that a block takes in a round of the grid; there is none from size() on.
  XS_HD int64_t dealt(int32_t round, int32_t num_rounds, int32_t block, int32_t num_blocks) const {
    int32_t const place = order == TileOrder::kLongestFirst
                              ? place_in_round(round, num_rounds, block, num_blocks)
                              : block;
    return static_cast<int64_t>(round) * num_blocks + place;
  }

  XS_HD QueryTile tile(int64_t index) const {
    int32_t const all_blocks = peer_blocks + blocks[rank];
    int64_t const peer_tiles = static_cast<int64_t>(num_groups) * peer_blocks;
    if (order == TileOrder::kNatural) {
      return at(static_cast<int32_t>(index / all_blocks), 0,
                static_cast<int32_t>(index % all_blocks));
    }
    if (order == TileOrder::kLongestFirst) {
      int32_t const block = all_blocks - 1 - static_cast<int32_t>(index / num_groups);
      return at(static_cast<int32_t>(index % num_groups), 0, block);
    }
    if (index < peer_tiles) {
      int const next = rank + 1 == world ? 0 : rank + 1;
      return at(static_cast<int32_t>(index / peer_blocks), next,
                static_cast<int32_t>(index % peer_blocks));
    }
    int64_t const own = index - peer_tiles;
    return at(static_cast<int32_t>(own / blocks[rank]), rank,
              static_cast<int32_t>(own % blocks[rank]));
  }

 private:
  // The block-th block of a (batch, head), counted from shard `owner` on, round the ring of ranks.
  XS_HD QueryTile at(int32_t group, int owner, int32_t block) const {
    while (block >= blocks[owner]) {
      block -= blocks[owner];
      owner = owner + 1 == world ? 0 : owner + 1;
    }
    int32_t const owner_row = block * block_m;
    return {group / num_heads,
            group % num_heads,
            owner,
            owner_row,
            rows.begin(owner) + owner_row,
            min_of(block_m, rows.count(owner) - owner_row)};
  }
};

XS_HD TileSchedule make_schedule(AttentionLayout const& layout, int rank, int32_t batch,
                                 int32_t block_m, TileOrder order) {
  TileSchedule schedule{};
  schedule.rows = layout.rows;
  schedule.block_m = block_m;
  schedule.world = layout.world;
  schedule.rank = rank;
  schedule.num_heads = layout.heads.count(rank);
  schedule.num_groups = batch * schedule.num_heads;
  schedule.order = order;
  for (int r = 0; r < layout.world; ++r) {
    schedule.blocks[r] = ceil_div(layout.rows.count(r), block_m);
    if (r != rank) schedule.peer_blocks += schedule.blocks[r];
  }
  return schedule;
}

// Keys that a query row may see end here. Causal is aligned at the ends: the last query row sees
// every key, as in FlashAttention.
XS_HD int32_t key_end(int32_t row, int32_t num_rows, int32_t num_keys, bool causal) {
  if (!causal) return num_keys;
  return max_of(0, min_of(num_keys, row + num_keys - num_rows + 1));
}

// Valid keys of a batch entry: half-open runs, ascending, disjoint. int32 [segments, 2]; a run with
// end <= begin is empty, so that entries of a batch may have different numbers of runs.
constexpr int kMaxSegments = 64;

enum class KeyBlock : int32_t { kNone, kSome, kAll };

XS_HD bool key_is_valid(int32_t const* segments, int32_t num_segments, int32_t key) {
  if (segments == nullptr) return true;
  for (int32_t i = 0; i < num_segments; ++i) {
    if (key >= segments[2 * i] && key < segments[2 * i + 1]) return true;
  }
  return false;
}

// How many of the keys [begin, end) are valid.
XS_HD KeyBlock classify_keys(int32_t const* segments, int32_t num_segments, int32_t begin,
                             int32_t end) {
  if (segments == nullptr) return KeyBlock::kAll;
  int32_t valid = 0;
  for (int32_t i = 0; i < num_segments; ++i) {
    valid += max_of(0, min_of(end, segments[2 * i + 1]) - max_of(begin, segments[2 * i]));
  }
  return valid == 0 ? KeyBlock::kNone : valid == end - begin ? KeyBlock::kAll : KeyBlock::kSome;
}

}  // namespace xstage
