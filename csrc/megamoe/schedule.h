// In which order the tiles of a rank are computed, and who computes which.
//
// Everything follows from the plan and the rows that each local expert received. The order is one
// sequence of cluster tiles 0, 1, 2, ...; a worker (a cluster of plan.cluster_size CTAs) takes an
// increasing subsequence: the static deal below, or tickets from a counter. Every wait of a tile
// points to tiles that come strictly earlier, so workers that walk forwards cannot deadlock,
// whatever their number.
//
//   step = [ a Linear-1 group | a Linear-2 group | both ]      group = m-blocks of one expert
//   Expert-Wave:  Linear-1 of all groups of a wave, then Linear-2 of the same, then the next wave.
//   Interleaved:  Linear-1 runs lead_blocks ahead; from then on every step holds a group of each,
//                 their tiles mixed evenly (mix = 1) or one after the other (mix = 0).
//
// Inside a group the two CTAs of a cluster take the same weight tile (n) on two adjacent m-blocks.
// If the second has at most half of its rows, they share out the three half blocks evenly (kSplit).
// A last odd block has no neighbour: there they take the same m-block on two adjacent n, right behind
// the pairs that read these, so that L2 still holds them.
#pragma once

#include "plan.h"

namespace xstage {

enum class TilePhase : int32_t { kNone = 0, kLinear1 = 1, kLinear2 = 2 };

// What the CTAs of a cluster have in common: who may multicast what. kSplit: weights, and the second
// half of the first block: each CTA takes half of its columns beside a half block of its own, since
// the second block has at most half of its rows.
enum class TileShare : int32_t { kNothing = 0, kWeights = 1, kTokens = 2, kSplit = 3 };

// One CTA's work. kNone: this CTA has no tile here while its partner has one (share = kNothing).
struct Tile {
  TilePhase phase;
  TileShare share;
  int32_t expert;  // local
  int32_t block;   // m-block, numbered through over all experts of this rank
  int32_t row;     // first row of the block within its expert
  int32_t rows;    // valid rows, 1 to block_m
  int32_t n;       // column tile
};

// Consecutive m-blocks of one expert.
struct BlockGroup {
  int32_t expert;
  int32_t first;   // first block, within the expert
  int32_t blocks;  // 0: none
  int32_t base;    // number of the expert's block 0
};

// Walks the m-blocks of all experts in order.
struct BlockFrontier {
  int32_t expert = 0;
  int32_t first = 0;  // next block, within the expert
  int32_t next = 0;   // next block, numbered through

  // Skips finished and empty experts; false when none is left.
  template <class Counts>
  XS_HD bool settle(MegaMoePlan const& plan, Counts const& counts) {
    while (expert < plan.experts_per_rank() && first >= blocks_of(plan, counts)) {
      ++expert;
      first = 0;
    }
    return expert < plan.experts_per_rank();
  }
  template <class Counts>
  XS_HD int32_t blocks_of(MegaMoePlan const& plan, Counts const& counts) const {
    return ceil_div(static_cast<int32_t>(counts[expert]), plan.block_m);
  }
  template <class Counts>
  XS_HD BlockGroup take(MegaMoePlan const& plan, Counts const& counts, int32_t most) {
    BlockGroup group{expert, first, min_of(blocks_of(plan, counts) - first, most), next - first};
    first += group.blocks;
    next += group.blocks;
    return group;
  }
};

// The order itself: seek(i) finds cluster tile i, tile(cta) says what each CTA of a cluster does.
// `Counts` is anything with counts[expert] (a pointer to shared memory on the device). A step costs
// a handful of integer operations; empty experts cost one comparison each, once.
template <class Counts>
class TileCursor {
 public:
  XS_HD TileCursor(MegaMoePlan const& plan, Counts counts) : plan_(plan), counts_(counts) {}

  // Moves forwards to cluster tile `index` (never less than before). False: past the end.
  XS_HD bool seek(int32_t index) {
    while (index >= step_begin_ + step_tiles()) {
      step_begin_ += step_tiles();
      if (!next_step()) return false;
    }
    index_ = index - step_begin_;
    return true;
  }

  XS_HD Tile tile(int32_t cta) const {
    int32_t const tiles1 = group_tiles(linear1_, plan_.linear1_tiles());
    int32_t const tiles2 = group_tiles(linear2_, plan_.linear2_tiles());
    // Linear-2 tiles before position i of this step; mixed: spread evenly over the step.
    int32_t before = min_of(index_, tiles2);
    bool second = index_ < tiles2;
    if (plan_.mix != 0 && tiles1 != 0 && tiles2 != 0) {
      uint32_t const total = static_cast<uint32_t>(tiles1 + tiles2);
      before = static_cast<int32_t>(static_cast<uint64_t>(index_) * tiles2 / total);
      second = static_cast<int32_t>(static_cast<uint64_t>(index_ + 1) * tiles2 / total) > before;
    }
    return second ? group_tile(TilePhase::kLinear2, linear2_, plan_.linear2_tiles(), before, cta)
                  : group_tile(TilePhase::kLinear1, linear1_, plan_.linear1_tiles(),
                               index_ - before, cta);
  }

 private:
  XS_HD int32_t group_tiles(BlockGroup const& group, int32_t tiles_n) const {
    int32_t const pairs = group.blocks / plan_.cluster_size;
    int32_t const odd = group.blocks % plan_.cluster_size;
    return pairs * tiles_n + odd * ceil_div(tiles_n, plan_.cluster_size);
  }
  XS_HD int32_t step_tiles() const {
    return group_tiles(linear1_, plan_.linear1_tiles()) +
           group_tiles(linear2_, plan_.linear2_tiles());
  }

  XS_HD Tile group_tile(TilePhase phase, BlockGroup const& group, int32_t tiles_n, int32_t index,
                        int32_t cta) const {
    int32_t const pairs = group.blocks / plan_.cluster_size;
    int32_t const odd = group.blocks % plan_.cluster_size;
    // All that read the same cluster_size weight tiles follow each other.
    int32_t const first_n = index / (pairs * plan_.cluster_size + odd) * plan_.cluster_size;
    int32_t const place = index % (pairs * plan_.cluster_size + odd);
    int32_t const paired = pairs * min_of(plan_.cluster_size, tiles_n - first_n);
    Tile tile{phase, TileShare::kWeights, group.expert, 0, 0, 0, 0};
    int32_t block = group.first;
    if (place < paired) {
      tile.n = first_n + place / pairs;
      block += place % pairs * plan_.cluster_size;
      int32_t const second =
          static_cast<int32_t>(counts_[group.expert]) - (block + 1) * plan_.block_m;
      if (2 * second <= plan_.block_m) tile.share = TileShare::kSplit;
      block += cta;
    } else {
      tile.n = first_n + cta;
      tile.share = first_n + 1 < tiles_n ? TileShare::kTokens : TileShare::kNothing;
      block += group.blocks - 1;
      if (tile.n >= tiles_n) tile.phase = TilePhase::kNone;
    }
    if (plan_.cluster_size == 1) tile.share = TileShare::kNothing;
    tile.block = group.base + block;
    tile.row = block * plan_.block_m;
    tile.rows = min_of(static_cast<int32_t>(counts_[group.expert]) - tile.row, plan_.block_m);
    return tile;
  }

  XS_HD bool next_step() {
    linear1_.blocks = linear2_.blocks = 0;
    bool const more1 = ahead_.settle(plan_, counts_);
    bool const more2 = behind_.settle(plan_, counts_);
    if (plan_.schedule == kExpertWave) {
      next_wave_step(more1);
    } else {
      next_mixed_step(more1);
    }
    return more2;  // Linear-2 finishes last
  }

  // Linear-1 until the wave is full, then Linear-2 until it has caught up.
  XS_HD void next_wave_step(bool more1) {
    int32_t const in_wave = ahead_.next - wave_begin_;
    int32_t room = plan_.wave_blocks - in_wave;
    if (more1 && ahead_.first == 0 && in_wave > 0 && ahead_.blocks_of(plan_, counts_) > room) {
      room = 0;  // the next expert does not fit whole: it opens the next wave
    }
    bool const draining = behind_.next > wave_begin_;
    if (more1 && room > 0 && !draining) {
      linear1_ = ahead_.take(plan_, counts_, min_of(room, plan_.group_blocks));
    } else if (behind_.next < ahead_.next) {
      take_linear2();
      if (behind_.next == ahead_.next) wave_begin_ = ahead_.next;
    }
  }

  // Linear-1 stays lead_blocks to lead_blocks + 2 group_blocks ahead, until it has finished.
  XS_HD void next_mixed_step(bool more1) {
    int32_t const gap = ahead_.next - behind_.next;
    bool const second = gap > 0 && (gap >= plan_.lead_blocks || !more1);
    if (more1 && gap <= plan_.lead_blocks + plan_.group_blocks) {
      linear1_ = ahead_.take(plan_, counts_, plan_.group_blocks);
    }
    // `gap` was read before Linear-1 moved: Linear-2 only takes blocks of earlier steps.
    if (second) take_linear2(gap);
  }

  XS_HD void take_linear2(int32_t most = 1 << 30) {
    most = min_of(most, min_of(ahead_.next - behind_.next, plan_.group_blocks));
    linear2_ = behind_.take(plan_, counts_, most);
  }

  MegaMoePlan const& plan_;
  Counts counts_;
  BlockFrontier ahead_{};   // Linear-1
  BlockFrontier behind_{};  // Linear-2
  int32_t wave_begin_ = 0;
  BlockGroup linear1_{};  // this step
  BlockGroup linear2_{};
  int32_t step_begin_ = 0;
  int32_t index_ = 0;
};

// The static deal: turn t of worker w. Mixed tiles alternate in the sequence, so a plain deal over
// an even number of workers would give one worker only Linear-1 and another only Linear-2; there
// the deal turns by one worker per turn.
XS_HD int32_t dealt_tile(MegaMoePlan const& plan, int32_t turn, int32_t worker) {
  int32_t const workers = plan.num_clusters();
  bool const turning = plan.schedule == kInterleaved && plan.mix != 0;
  return turn * workers + (turning ? (worker + turn) % workers : worker);
}

// Which source's row stands at a row of an expert; source -1: none.
struct RowSource {
  int32_t source = -1;
  int32_t index = 0;  // within the rows of that source for this expert
};

// Who asks for one row at a time is done when it has found it.
struct AskedAlone {
  XS_HD bool operator()(bool done) const { return done; }
};

// Source after source, from first_source on. count_of(source) gives the rows of a source.
template <class CountOf>
XS_HD RowSource row_source_in_order(int32_t world, int32_t first_source, int32_t row,
                                    CountOf count_of) {
  RowSource found;
  int32_t begin = 0;
  for (int32_t i = 0; i < world; ++i) {
    int32_t const source = (first_source + i) % world;
    int32_t const count = static_cast<int32_t>(count_of(source));
    if (row >= begin && row < begin + count) found = {source, row - begin};
    begin += count;
  }
  return found;
}

// One row of every source in turn, from first_source on, so that all links are pulled evenly and
// beside this rank's own rows; sources that run out drop out. At most `world` rounds.
template <class CountOf, class AllDone = AskedAlone>
XS_HD RowSource row_source_in_turn(int32_t world, int32_t first_source, int32_t row,
                                   CountOf count_of, AllDone all_done = {}) {
  RowSource found;
  int32_t taken = 0;  // rows that every remaining source has given in earlier rounds
  for (int32_t round = 0; round < world; ++round) {
    int32_t active = 0;
    int32_t least = 1 << 30;
    for (int32_t s = 0; s < world; ++s) {
      int32_t const left = static_cast<int32_t>(count_of(s)) - taken;
      active += left > 0;
      if (left > 0) least = min_of(least, left);
    }
    if (active == 0) break;
    bool const this_round = found.source < 0 && row >= 0 && row < active * least;
    int32_t place = this_round ? row % active : -1;
    for (int32_t i = 0; i < world; ++i) {
      int32_t const s = (first_source + i) % world;
      bool const gives = static_cast<int32_t>(count_of(s)) > taken;
      if (gives && place-- == 0) found = {s, taken + row / active};
    }
    if (all_done(found.source >= 0 || row < 0)) break;
    row -= active * least;
    taken += least;
  }
  return found;
}

// The order of an expert's rows at its owner `rank`: pulled in turn; where tokens are pushed this
// rank's own first, which are there. The lanes of a warp may ask together, each for a row of its
// own, or for none (negative): all call count_of alike, and all_done says what all lanes are.
template <class CountOf, class AllDone = AskedAlone>
XS_HD RowSource row_source(MegaMoePlan const& plan, int32_t rank, int32_t row, CountOf count_of,
                           AllDone all_done = {}) {
  if (plan.dispatch == kPush) return row_source_in_order(plan.world, rank, row, count_of);
  return row_source_in_turn(plan.world, (rank + 1) % plan.world, row, count_of, all_done);
}

}  // namespace xstage
