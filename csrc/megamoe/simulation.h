// Predicts one rank's megamoe call by running its schedule (schedule.h) against the Burst-Gap law.
//
// Mirror assumption: the other ranks do the same at the same time, so the peers pull from this rank
// as fast as this rank pulls from them, and the answers share its egress with its own stores. So do
// tokens that are pushed: they leave as fast as others come.
//
// A worker is a cluster. Per tile: wait for flags; main loop, which needs its arithmetic, its
// operands from memory where L2 no longer has them, and loads that are not in a burst's shadow;
// epilogue; for Linear-2 the stores, by the plan's mechanism. Workers meet in three fluid servers:
// the egress link, device memory, and tokens, pulled or pushed, in block order.
#pragma once

#include <algorithm>
#include <cmath>

#include "schedule.h"
#include "simulate.h"

namespace xstage {

class MegaMoeSimulation {
 public:
  MegaMoeSimulation(MegaMoePlan const& plan, SimulatedMachine const& machine,
                    std::vector<double> rates, std::vector<int32_t> counts,
                    std::vector<int32_t> remote_rows, std::vector<double> const& link_rows,
                    bool trace)
      : plan_(plan),
        machine_(machine),
        rates_(std::move(rates)),
        counts_(std::move(counts)),
        remote_rows_(std::move(remote_rows)),
        tracing_(trace),
        operands_(plan, static_cast<int32_t>(remote_rows_.size()), machine.reuse_bytes),
        bins_(machine.bin_us),
        link_(plan.num_clusters(), plan.cluster_size),
        memory_(plan.num_clusters(), plan.cluster_size),
        pull_(plan, counts_, link_rows, machine.local_share) {
    int32_t const blocks = static_cast<int32_t>(remote_rows_.size());
    linear1_left_.assign(blocks, plan.linear1_tiles());
    linear2_left_.assign(blocks, plan.linear2_tiles());
    for (auto& list : waiters_) list.resize(blocks);
    for (int32_t w = 0; w < plan.num_clusters(); ++w) {
      workers_.emplace_back(TileCursor<int32_t const*>(plan_, counts_.data()));
      at(machine.setup_us, {kBegin, w});
    }
  }

  void run() {
    advance(machine_.setup_us);
    arrivals();
    rebalance();
    while (step()) {
    }
    for (SimulatedWorker const& worker : workers_) {
      XS_CHECK(worker.done,
               "xstage.megamoe_simulate: the schedule does not finish: a tile waits for "
               "rows or a ring slot that never come free");
    }
    while (link_.active_weight() > 0) {  // what is still in flight
      advance(link_.next_time(now_));
      SimEvent event;
      link_.pop(&event);
      rebalance();
    }
    drained_us_ = now_;
  }

  double drained_us() const { return drained_us_; }
  double pulled_us() const { return pulled_us_; }
  double store_bytes() const { return store_bytes_; }
  double pull_bytes() const { return pull_.bytes(); }
  double memory_bytes() const { return operands_.fetched(); }
  std::vector<SimulatedWorker> const& workers() const { return workers_; }
  std::vector<double> const& bins() const { return bins_.values(); }
  std::vector<double> const& trace() const { return trace_; }

 private:
  static constexpr int32_t kMathWarps = 8;
  struct Timed {
    double time;
    int64_t order;  // events of one instant fire in the order in which they were scheduled
    SimEvent event;
    bool operator<(Timed const& other) const {
      return time != other.time ? time > other.time : order > other.order;
    }
  };

  void at(double time, SimEvent event) { events_.push({time, num_events_++, event}); }

  // One event; false when nothing is left to happen.
  bool step() {
    double const timed = events_.empty() ? kForever : events_.top().time;
    double const link = link_.next_time(now_);
    double const memory = memory_.next_time(now_);
    double const pull = pull_.next_time(now_);
    double const next = std::min(std::min(timed, link), std::min(memory, pull));
    if (next == kForever || (timed == kForever && remaining_ == 0)) return false;
    advance(next);
    SimEvent event{-1, -1};
    if (timed == next) {
      event = events_.top().event;
      events_.pop();
      handle(event);
    } else if (link == next) {
      if (link_.pop(&event)) handle(event);
    } else if (memory == next) {
      if (memory_.pop(&event)) handle(event);
    } else {
      pull_.reach_target();
      arrivals();
    }
    rebalance();
    return true;
  }

  void advance(double time) {
    double const elapsed = std::max(0.0, time - now_);
    link_.advance(elapsed);
    memory_.advance(elapsed);
    double const pulled = pull_.advance(elapsed);
    bins_.record(now_, time, link_speed_ * link_.active_weight() * elapsed, pulled);
    now_ = std::max(now_, time);
  }

  // Shares of the egress and of the memory among those who want them now.
  void rebalance() {
    double const full = rates_.back() * kBytesPerUs;
    int32_t const weight = link_.active_weight();
    double stores = rates_[weight] * kBytesPerUs;
    double const pull_most = machine_.pull_GBps * kBytesPerUs;
    if (pull_.active()) {
      double const wanted = pull_most * pull_.on_link();
      double const left = std::max(full * (1.0 - machine_.pull_share), full - wanted);
      stores = std::min(stores, left);
      pull_.set_speed(pull_most, full - stores);
    }
    link_speed_ = weight ? stores / weight : 0.0;
    link_.set_speed(link_speed_);
    int32_t const readers = memory_.active_weight();
    memory_.set_speed(
        readers ? std::min(machine_.hbm_sm_GBps, machine_.hbm_GBps / readers) * kBytesPerUs : 0.0);
  }

  // Linear-1 went on, or rows came in: blocks that are complete now may be waited for.
  void arrivals() {
    int32_t const blocks = static_cast<int32_t>(linear1_left_.size());
    while (l1_frontier_ < blocks && linear1_left_[l1_frontier_] == 0) ++l1_frontier_;
    pull_.settle(l1_frontier_ + plan_.x_ring_blocks, [&](int32_t block) {
      pulled_us_ = now_;
      operands_.arrived(block, 2.0 * plan_.block_m * plan_.hidden);
      wake(0, block);
    });
  }

  void wake(int32_t list, int32_t block) {
    for (int32_t worker : waiters_[list][block]) at(now_ + machine_.flag_us, {kBegin, worker});
    waiters_[list][block].clear();
  }

  // ---- one worker ---------------------------------------------------------------------------

  void handle(SimEvent event) {
    SimulatedWorker& worker = workers_[event.worker];
    int32_t const w = event.worker;
    switch (event.kind) {
      case kBegin:
        return begin(worker, w);
      case kGateOpen:
        return gate_open(worker, w);
      case kArithmeticEnd:
      case kOperandsEnd:
        if (--worker.open == 0) main_end(worker, w);
        return;
      case kEpilogueEnd:
        return epilogue_end(worker, w);
      case kCapacityFree:
        // Completion-coupled: the fence's latency follows the last byte.
        if (machine_.coupling == 1.0) return at(now_ + machine_.visibility_us, {kVisible, w});
        [[fallthrough]];
      case kIssueEnd:
      case kVisible:
        if (--worker.open == 0) issue_end(worker, w);
        return;
      case kSlice:
        return slice(worker, w);
      case kStagingFree:
        if (worker.waits_for_staging && staging_free(worker)) main_end(worker, w);
        return;
      default:
        return;
    }
  }

  // Takes a tile if there is none, and starts it when its flags are set.
  void begin(SimulatedWorker& worker, int32_t w) {
    if (!worker.has_tile) {
      int32_t const index =
          machine_.tickets != 0.0 ? tickets_++ : dealt_tile(plan_, worker.turn++, w);
      if (!worker.cursor.seek(index)) {
        worker.done = true;
        worker.times[kEnd] = now_;
        --remaining_;
        return;
      }
      for (int32_t cta = 0; cta < plan_.cluster_size; ++cta) {
        worker.tiles[cta] = worker.cursor.tile(cta);
      }
      worker.has_tile = true;
      worker.since = now_;
    }
    for (int32_t cta = 0; cta < plan_.cluster_size; ++cta) {
      if (waits_for_flag(worker.tiles[cta], w)) return;
    }
    start_main(worker, w);
  }

  bool waits_for_flag(Tile const& tile, int32_t w) {
    if (tile.phase == TilePhase::kNone) return false;
    int32_t list = -1, block = tile.block;
    if (tile.phase == TilePhase::kLinear2) {
      if (linear1_left_[block] != 0) list = 1;
    } else if (!pull_.arrived(block)) {
      list = 0;
    } else if (block >= plan_.h_ring_blocks && linear2_left_[block - plan_.h_ring_blocks] != 0) {
      list = 2;
      block -= plan_.h_ring_blocks;
    }
    if (list >= 0) waiters_[list][block].push_back(w);
    return list >= 0;
  }

  void start_main(SimulatedWorker& worker, int32_t w) {
    bool const second = worker.tiles[0].phase == TilePhase::kLinear2;
    worker.times[kFlagWait] += now_ - worker.since;
    worker.main_us = (second ? machine_.linear2_us : machine_.linear1_us) *
                     filling(plan_, worker.tiles, machine_.half_share) *
                     (1.0 + machine_.jitter * tile_noise(worker.tiles[0]));
    worker.times[kMath] += worker.main_us;
    worker.tile_begin = worker.since;
    worker.main_begin = now_;
    worker.shadow_us = 0.0;
    worker.open = 1;
    double const bytes = operands_.missing_bytes(worker.tiles, second);
    if (bytes > 0.0) {
      memory_.push(w, bytes / plan_.cluster_size);
      memory_.watch(memory_.tail(w), {kOperandsEnd, w});
      ++worker.open;
    }
    if (link_.reached(worker.gate_level)) {
      at(now_ + worker.main_us, {kArithmeticEnd, w});
    } else {
      link_.watch(worker.gate_level, {kGateOpen, w});
    }
  }

  // The loads were held up; the main loop ran on what was loaded before.
  void gate_open(SimulatedWorker& worker, int32_t w) {
    double const held = std::max(0.0, now_ - worker.main_begin - machine_.prefetch_us);
    worker.times[kShadowWait] += held;
    worker.shadow_us = held;
    at(std::max(now_, worker.main_begin + worker.main_us + held), {kArithmeticEnd, w});
  }

  bool staging_free(SimulatedWorker const& worker) const {
    return worker.slices_left == 0 && link_.reached(worker.staging_level);
  }

  void main_end(SimulatedWorker& worker, int32_t w) {
    bool const second = worker.tiles[0].phase == TilePhase::kLinear2;
    if (!worker.waits_for_staging) {
      double const held = now_ - worker.main_begin - worker.main_us - worker.shadow_us;
      worker.times[kMemoryWait] += std::max(0.0, held);
      worker.since = now_;
      if (second && plan_.store != kPlainStores && !staging_free(worker)) {
        worker.waits_for_staging = true;
        return;
      }
    }
    worker.waits_for_staging = false;
    worker.times[kStall] += now_ - worker.since;
    at(now_ + (second ? machine_.epilogue2_us : machine_.epilogue1_us), {kEpilogueEnd, w});
  }

  void epilogue_end(SimulatedWorker& worker, int32_t w) {
    bool const second = worker.tiles[0].phase == TilePhase::kLinear2;
    double remote = 0.0;
    for (int32_t cta = 0; cta < plan_.cluster_size; ++cta) {
      Tile const& tile = worker.tiles[cta];
      if (tile.phase == TilePhase::kNone) continue;
      std::vector<int32_t>& left = second ? linear2_left_ : linear1_left_;
      if (!second) operands_.wrote(tile.block, 1.0 * tile.rows * plan_.block_n);
      if (--left[tile.block] == 0) {
        wake(second ? 2 : 1, tile.block);
        if (!second) arrivals();
      }
      remote += 2.0 * plan_.block_n * remote_rows_[tile.block];
    }
    if (!second) return next_tile(worker, w, now_);
    worker.since = now_;
    remote /= plan_.cluster_size;
    store_bytes_ += remote * plan_.cluster_size;
    if (plan_.store == kBulkPaced) {
      // Every math warp sends slice_rows of its rows per step.
      int32_t const slices = ceil_div(plan_.block_m / kMathWarps, plan_.slice_rows);
      worker.slices_left = slices;
      worker.slice_bytes = remote / slices;
      slice(worker, w);
      return next_tile(worker, w, now_);
    }
    link_.push(w, remote);
    note_levels(worker, w, 0.0);
    if (plan_.store == kBulkBurst && machine_.coupling != 1.0) return next_tile(worker, w, now_);
    worker.open = 1;
    at(now_ + machine_.issue_us, {kIssueEnd, w});
    double const free = machine_.coupling == 1.0 ? link_.tail(w) : worker.staging_level;
    if (machine_.coupling != 2.0 && !link_.reached(free)) {
      link_.watch(free, {kCapacityFree, w});
      ++worker.open;
    }
  }

  // After bytes were queued: when loads are out of the shadow, and when the issuer is free.
  void note_levels(SimulatedWorker& worker, int32_t w, double slack_bytes) {
    if (machine_.coupling == 2.0) return;
    double const tail = link_.tail(w);
    worker.staging_level = tail - machine_.capacity_bytes;
    worker.gate_level = tail - std::max(machine_.passed_bytes, slack_bytes);
    if (machine_.cross_bytes >= 0.0) {
      worker.gate_level = std::min(worker.gate_level, link_.level() + machine_.cross_bytes);
    }
  }

  void slice(SimulatedWorker& worker, int32_t w) {
    link_.push(w, worker.slice_bytes);
    note_levels(worker, w, worker.slice_bytes);
    if (--worker.slices_left > 0) {
      double const pace = std::max(machine_.issue_slice_us, machine_.pace_us);
      at(now_ + pace, {kSlice, w});
    } else if (link_.reached(worker.staging_level)) {
      at(now_, {kStagingFree, w});
    } else {
      link_.watch(worker.staging_level, {kStagingFree, w});
    }
  }

  void issue_end(SimulatedWorker& worker, int32_t w) {
    double const span = now_ - worker.since;
    worker.times[kIssue] += std::min(span, machine_.issue_us);
    worker.times[kStall] += std::max(0.0, span - machine_.issue_us);
    next_tile(worker, w, now_);
  }

  void next_tile(SimulatedWorker& worker, int32_t w, double time) {
    // Someone who stages a burst looks at its buffer again when the burst has been read.
    if (plan_.store == kBulkBurst && !link_.reached(worker.staging_level)) {
      link_.watch(worker.staging_level, {kStagingFree, w});
    }
    if (tracing_) {
      Tile const& tile = worker.tiles[0];
      trace_.insert(trace_.end(),
                    {double(w), double(static_cast<int32_t>(tile.phase)), double(tile.block),
                     double(tile.n), worker.tile_begin, worker.main_begin, worker.since, time});
    }
    worker.has_tile = false;
    begin(worker, w);
  }

  MegaMoePlan const plan_;
  SimulatedMachine const machine_;
  std::vector<double> const rates_;         // [SMs that store] GB/s
  std::vector<int32_t> const counts_;       // [local expert] rows
  std::vector<int32_t> const remote_rows_;  // [block]
  bool const tracing_;

  double now_ = 0.0;
  int64_t num_events_ = 0;
  std::priority_queue<Timed> events_;
  OperandCache operands_;
  LinkBins bins_;
  FairServer link_;
  FairServer memory_;
  double link_speed_ = 0.0;

  TokenPull pull_;
  double pulled_us_ = 0.0;
  int32_t l1_frontier_ = 0;

  std::vector<SimulatedWorker> workers_;
  int32_t remaining_ = plan_.num_clusters();
  int32_t tickets_ = 0;
  std::vector<int32_t> linear1_left_, linear2_left_;
  std::vector<std::vector<int32_t>> waiters_[3];  // for arrived, Linear-1, Linear-2 of a block

  double store_bytes_ = 0.0;
  double drained_us_ = 0.0;
  std::vector<double> trace_;
};

}  // namespace xstage
