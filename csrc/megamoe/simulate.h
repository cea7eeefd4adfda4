// What the simulator of megamoe assumes about a machine, and the fair server that it is made of.
//
// The Burst-Gap law speaks of K producers that burst together. Here producers burst when their
// tiles end, so the law is applied per SM: every SM has its own queue of bytes in flight, of
// capacity Q / SMs, and the link drains all queues that are not empty at equal speed. When all SMs
// burst together this is exactly the law: (V - Q) / R = (B - Q / K) / (R / K).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <queue>
#include <vector>

#include "schedule.h"

namespace xstage {

// X(name, meaning). Times in us, rates in GB/s, volumes in bytes; "per SM" where it says so.
#define XS_SIMULATION_FIELDS(X)                                                            \
  X(linear1_us, "main loop of a Linear-1 tile, operands in L2")                            \
  X(linear2_us, "main loop of a Linear-2 tile, operands in L2")                            \
  X(epilogue1_us, "per Linear-1 tile: accumulators to activations, their stores, flags")   \
  X(epilogue2_us, "per Linear-2 tile: accumulators to staged results, flags")              \
  X(flag_us, "from a release on one SM until another one goes on")                         \
  X(setup_us, "from the start of the kernel until tokens can move")                        \
  X(hbm_GBps, "reads from device memory by all SMs")                                       \
  X(hbm_sm_GBps, "the same by one SM at most")                                             \
  X(reuse_bytes, "an operand is in L2 if fewer bytes entered L2 since its last use")       \
  X(half_share, "share of a main loop that a tile with at most half of its rows takes")    \
  X(pull_GBps, "reads from peers by one rank at most")                                     \
  X(local_share, "what pulling a row of this rank takes, over that of a peer's row")       \
  X(pull_share, "share of the egress that answers to pulls get while stores want it too")  \
  X(issue_us, "T0 of a whole tile")                                                        \
  X(issue_slice_us, "T0 of one slice")                                                     \
  X(capacity_bytes, "Q per SM: bytes in flight at which the issuer may go on")             \
  X(passed_bytes, "per SM: bytes in flight that no longer hold up a load of the same SM")  \
  X(cross_bytes, "per SM: store bytes that a load lets pass first; negative: all of them") \
  X(prefetch_us, "main loop that runs on operands loaded before the burst")                \
  X(visibility_us, "from the last byte's departure until a fence returns")                 \
  X(pace_us, "paced: from slice to slice, a step of the main loop")                        \
  X(coupling, "0 the law, 1 wait until visible after every burst, 2 never wait")           \
  X(tickets, "0 the static deal, 1 tickets from a counter")                                \
  X(tokens, "of a source in this call: how often one is wanted by several experts")        \
  X(jitter, "main loops are longer or shorter by up to this share, at random")             \
  X(bin_us, "width of the link's bins in the result")

struct SimulatedMachine {
#define X(name, meaning) double name;
  XS_SIMULATION_FIELDS(X)
#undef X
};

constexpr double kForever = std::numeric_limits<double>::infinity();
constexpr double kBytesPerUs = 1e3;  // one GB/s

struct SimEvent {
  int32_t kind;
  int32_t worker;
};

// Drains the queues of many flows at equal speed per unit of weight (generalised processor
// sharing). `level` is what a queue that was never empty has drained so far, so a queue of tail F
// is empty, or shorter than c bytes, when the level reaches F, or F - c: one heap of levels serves
// all flows.
class FairServer {
 public:
  FairServer(int32_t num_flows, int32_t weight)
      : weight_of_flow_(weight), tails_(num_flows, 0.0), active_(num_flows, 0) {}

  double backlog(int32_t flow) const { return tails_[flow] > level_ ? tails_[flow] - level_ : 0.0; }
  double tail(int32_t flow) const { return tails_[flow]; }
  double level() const { return level_; }
  int32_t active_weight() const { return active_weight_; }
  bool reached(double level) const { return level <= level_; }

  void push(int32_t flow, double bytes) {
    if (bytes <= 0.0) return;
    tails_[flow] = (tails_[flow] > level_ ? tails_[flow] : level_) + bytes;
    if (!active_[flow]) {
      active_[flow] = 1;
      active_weight_ += weight_of_flow_;
      marks_.push({tails_[flow], kFlowEnd, flow});
    }
  }
  // The event fires when the level is reached; it must not have been reached yet.
  void watch(double level, SimEvent event) { marks_.push({level, event.kind, event.worker}); }

  // Bytes per us and unit of weight from now on.
  void set_speed(double speed) { speed_ = speed; }
  double next_time(double now) const {
    if (marks_.empty()) return kForever;
    double const ahead = marks_.top().level - level_;
    // What the level has reached fires even when the last queue has just run empty.
    if (ahead <= 0.0) return now;
    return speed_ > 0.0 ? now + ahead / speed_ : kForever;
  }
  void advance(double elapsed) { level_ += speed_ * elapsed; }

  // Called when next_time() has come. False when only a queue ran empty.
  bool pop(SimEvent* event) {
    Mark const mark = marks_.top();
    marks_.pop();
    if (mark.level > level_) level_ = mark.level;
    if (mark.kind != kFlowEnd) {
      *event = {mark.kind, mark.flow};
      return true;
    }
    if (tails_[mark.flow] > level_) {  // refilled meanwhile
      marks_.push({tails_[mark.flow], kFlowEnd, mark.flow});
    } else {
      active_[mark.flow] = 0;
      active_weight_ -= weight_of_flow_;
    }
    return false;
  }

 private:
  static constexpr int32_t kFlowEnd = -1;
  struct Mark {
    double level;
    int32_t kind;
    int32_t flow;
    bool operator<(Mark const& other) const { return level > other.level; }  // smallest on top
  };

  int32_t weight_of_flow_;
  int32_t active_weight_ = 0;
  double level_ = 0.0;
  double speed_ = 0.0;
  std::vector<double> tails_;
  std::vector<char> active_;
  std::priority_queue<Mark> marks_;
};

// A number in [-1, 1) that depends on the tile only (splitmix64), so that runs repeat exactly.
inline double tile_noise(Tile const& tile) {
  uint64_t x = (uint64_t{1} << 62) * static_cast<uint64_t>(tile.phase) +
               (static_cast<uint64_t>(tile.block) << 16) + static_cast<uint64_t>(tile.n);
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return static_cast<double>((x ^ (x >> 31)) >> 11) * 0x1p-52 - 1.0;
}

// A warpgroup without rows leaves the tensor cores to the other; the CTAs of a cluster keep step, or
// share out three half blocks.
inline double filling(MegaMoePlan const& plan, Tile const* tiles, double half_share) {
  for (int32_t cta = 0; cta < plan.cluster_size; ++cta) {
    if (tiles[cta].share == TileShare::kSplit) return (1.0 + half_share) / 2.0;
    if (tiles[cta].rows > plan.block_m / 2) return 1.0;
  }
  return half_share;
}

// Which operands L2 still holds, by distance of reuse: an operand is there when fewer than
// `reuse_bytes` entered L2 since its last use.
class OperandCache {
 public:
  OperandCache(MegaMoePlan const& plan, int32_t blocks, double reuse_bytes)
      : plan_(plan), reuse_bytes_(reuse_bytes) {
    int64_t const experts = plan.experts_per_rank();
    weights_used_[0].assign(experts * plan.linear1_tiles(), -kForever);
    weights_used_[1].assign(experts * plan.linear2_tiles(), -kForever);
    for (auto& used : block_used_) used.assign(blocks, 0.0);
  }

  double fetched() const { return fetched_; }
  // Rows of the block came in, or Linear-1 wrote a tile of its activations: both pass through L2.
  void arrived(int32_t block, double bytes) { block_used_[0][block] = clock_ += bytes; }
  void wrote(int32_t block, double bytes) { block_used_[1][block] = clock_ += bytes; }

  // Bytes of a cluster's operands that must come from memory; notes their use.
  double missing_bytes(Tile const* tiles, bool second) {
    double const depth = second ? plan_.intermediate : plan_.hidden;
    int32_t const tiles_n = second ? plan_.linear2_tiles() : plan_.linear1_tiles();
    double missing = 0.0;
    for (int32_t cta = 0; cta < plan_.cluster_size; ++cta) {
      Tile const& tile = tiles[cta];
      if (tile.phase == TilePhase::kNone) continue;
      missing += touch(weights_used_[second][int64_t{1} * tile.expert * tiles_n + tile.n],
                       2.0 * plan_.block_n * depth);
      missing += touch(block_used_[second][tile.block], 2.0 * tile.rows * depth);
    }
    return missing;
  }

 private:
  double touch(double& last_use, double bytes) {
    double const missing = clock_ - last_use < reuse_bytes_ ? 0.0 : bytes;
    fetched_ += missing;
    last_use = clock_ += missing;
    return missing;
  }

  MegaMoePlan const& plan_;
  double const reuse_bytes_;
  double clock_ = 0.0;    // bytes that entered L2
  double fetched_ = 0.0;  // of these: operands that came from memory
  std::vector<double> block_used_[2], weights_used_[2];
};

// Bytes that left the rank, by time: (own stores, answers to pulls) per bin.
class LinkBins {
 public:
  explicit LinkBins(double width) : width_(width) {}

  std::vector<double> const& values() const { return values_; }

  void record(double begin, double end, double stores, double pulls) {
    double const elapsed = end - begin;
    if (elapsed <= 0.0 || (stores <= 0.0 && pulls <= 0.0)) return;
    int64_t const last = static_cast<int64_t>(end / width_);
    if (static_cast<int64_t>(values_.size()) < 2 * (last + 1)) values_.resize(2 * (last + 1), 0.0);
    for (int64_t bin = static_cast<int64_t>(begin / width_); bin <= last; ++bin) {
      double const from = std::max(begin, static_cast<double>(bin) * width_);
      double const to = std::min(end, static_cast<double>(bin + 1) * width_);
      double const part = std::max(0.0, to - from) / elapsed;
      values_[2 * bin] += stores * part;
      values_[2 * bin + 1] += pulls * part;
    }
  }

 private:
  double const width_;
  std::vector<double> values_;
};

// Rows of x travel in block order, as a fluid. Those that are on this rank already cost the dispatch
// warps something too, but no bytes on the link: a block counts as its rows that cross the link and a
// share of the others.
class TokenPull {
 public:
  TokenPull(MegaMoePlan const& plan, std::vector<int32_t> const& counts,
            std::vector<double> const& link_rows, double local_share) {
    double const row_bytes = 2.0 * plan.hidden;
    double remote = 0.0, all = 0.0;
    for (int32_t rows : counts) {
      for (; rows > 0; rows -= plan.block_m) {
        double const crossing = link_rows[costs_.size()];
        costs_.push_back(row_bytes *
                         (crossing + local_share * (min_of(rows, plan.block_m) - crossing)));
        remote += row_bytes * crossing;
        all += costs_.back();
      }
    }
    on_link_ = all > 0.0 ? remote / all : 0.0;
    if (!costs_.empty()) target_ = costs_[0];
  }

  bool active() const { return active_; }
  bool arrived(int32_t block) const { return block < next_; }
  // Bytes that crossed the link, and their share of what is pulled.
  double bytes() const { return pulled_ * on_link_; }
  double on_link() const { return on_link_; }
  void set_speed(double most, double link_left) {
    speed_ = std::max(on_link_ > 0.0 ? std::min(most, link_left / on_link_) : most, 1e-9);
  }
  double next_time(double now) const {
    return active_ ? now + std::max(0.0, target_ - pulled_) / speed_ : kForever;
  }
  double advance(double elapsed) {
    double const bytes = active_ ? speed_ * elapsed : 0.0;
    pulled_ += bytes;
    return bytes * on_link_;
  }
  void reach_target() { pulled_ = target_; }

  // Blocks whose rows are all here, as far as the ring has room (blocks below `limit`).
  template <class OnArrival>
  void settle(int32_t limit, OnArrival on_arrival) {
    int32_t const blocks = static_cast<int32_t>(costs_.size());
    limit = std::min(limit, blocks);
    while (next_ < limit && pulled_ >= target_ - 1e-6) {
      int32_t const block = next_++;
      if (next_ < blocks) target_ += costs_[next_];
      on_arrival(block);
    }
    active_ = next_ < limit;
  }

 private:
  std::vector<double> costs_;  // [block]
  double on_link_ = 0.0;
  bool active_ = false;
  int32_t next_ = 0;     // first block that is not complete
  double target_ = 0.0;  // bytes pulled when it will be
  double pulled_ = 0.0;
  double speed_ = 1.0;
};

enum SimulationEvent : int32_t {
  kBegin,          // look for the next tile, or look at its flags again
  kArithmeticEnd,  // the main loop's arithmetic is done
  kGateOpen,       // loads have left the shadow of the worker's own stores
  kOperandsEnd,    // device memory has delivered
  kEpilogueEnd,
  kIssueEnd,      // T0 is over
  kCapacityFree,  // few enough bytes are in flight
  kVisible,       // completion-coupled: the fence returns
  kSlice,         // the next slice of a paced tile leaves
  kStagingFree    // the staging buffer may be written again
};

// Columns of the per-worker result.
enum SimulatedColumn { kMath, kFlagWait, kShadowWait, kMemoryWait, kIssue, kStall, kEnd, kColumns };

struct SimulatedWorker {
  explicit SimulatedWorker(TileCursor<int32_t const*> cursor_) : cursor(cursor_) {}

  TileCursor<int32_t const*> cursor;
  Tile tiles[2];
  int32_t turn = 0;
  int32_t open = 0;  // conditions that the current step still waits for
  bool has_tile = false;
  bool waits_for_staging = false;
  bool done = false;
  double since = 0.0;      // when the current step began
  double main_us = 0.0;    // length of the current main loop
  double shadow_us = 0.0;  // part of the current main loop in the shadow
  double tile_begin = 0.0;
  double main_begin = 0.0;
  double gate_level = 0.0;     // loads are free when the link's level reaches it
  double staging_level = 0.0;  // the staging buffer is free when it is reached and no slice is left
  int32_t slices_left = 0;
  double slice_bytes = 0.0;
  double times[kColumns] = {};
};

}  // namespace xstage
