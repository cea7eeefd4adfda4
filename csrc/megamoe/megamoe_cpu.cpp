// megamoe on the CPU: exact and slow, over the same workspace, layout and schedule as the kernel.
//
// A rank walks its tiles in schedule order in one thread. Where the kernel waits for a counter,
// this code checks it: a tile whose operands are not there yet is a fault of the schedule.
#include <cmath>
#include <cstring>

#include "common/channel_cpu.h"
#include "gemm_cpu.h"
#include "ops.h"
#include "schedule.h"

namespace xstage {
namespace {

// One rank's state during a call.
class RankCall {
 public:
  explicit RankCall(MegaMoeArguments const& arguments)
      : a_(arguments),
        plan_(arguments.plan),
        workspace_(arguments.workspace),
        layout_(arguments.plan),
        epoch_(cpu::call_epoch(arguments.workspace)),
        bank_(static_cast<int32_t>(epoch_ & 1)),
        rank_(static_cast<int32_t>(arguments.workspace.rank)),
        num_tokens_(valid_tokens()) {}

  void send();     // counts, routes and tokens to where owners find them
  void compute();  // wait for all sources, then every tile in order
  void combine();  // wait for all owners, then add the slots up

 private:
  int64_t valid_tokens() const {
    int64_t const rows = a_.tokens();
    if (!a_.num_tokens) return rows;
    void const* const data = a_.num_tokens->const_data_ptr();
    int64_t const asked = a_.num_tokens->scalar_type() == ScalarType::Long
                              ? *static_cast<int64_t const*>(data)
                              : *static_cast<int32_t const*>(data);
    return min_of<int64_t>(max_of<int64_t>(asked, 0), rows);
  }

  MegaMoeView view(int64_t of_rank) const { return {workspace_.region(of_rank)}; }
  MegaMoeView own() const { return view(rank_); }
  uint32_t* counter(MegaMoeCounter which) const { return own().counter(layout_, bank_, which); }

  uint16_t const* own_token(int64_t choice) const {
    return static_cast<uint16_t const*>(a_.x.const_data_ptr()) + choice / plan_.topk * plan_.hidden;
  }
  uint16_t* pushed_token(int32_t source, int32_t owner, int64_t choice, int32_t expert) const;
  void push_token(int64_t choice, int32_t expert) const;
  uint16_t const* received_token(int32_t source, int64_t choice, int32_t expert) const;

  int32_t expert_of(int64_t choice) const;
  bool wait_for_sources();
  void read_counts();
  void fill_block(int64_t block);
  void linear1(Tile const& tile);
  void linear2(Tile const& tile);
  void expect(bool holds, char const* what, Tile const& tile) const;

  MegaMoeArguments const& a_;
  MegaMoePlan const& plan_;
  Workspace const& workspace_;
  MegaMoeLayout layout_;
  uint64_t epoch_;
  int32_t bank_;
  int32_t rank_;
  int64_t num_tokens_;

  bool alive_ = true;
  std::vector<int32_t> rows_;          // [local expert]
  std::vector<int32_t> block_expert_;  // [block]
  std::vector<int32_t> block_row_;     // [block] first row within its expert
  int64_t filled_ = 0;
};

// The expert of a choice, or -1 for one to skip. Ids that are neither are masked and recorded.
int32_t RankCall::expert_of(int64_t choice) const {
  void const* const ids = a_.topk_idx.const_data_ptr();
  int64_t const id = a_.topk_idx.scalar_type() == ScalarType::Long
                         ? static_cast<int64_t const*>(ids)[choice]
                         : static_cast<int32_t const*>(ids)[choice];
  if (id >= 0 && id < plan_.num_experts) return static_cast<int32_t>(id);
  if (id != -1) {
    WaitSite const site{Phase::kDispatchCounts, -1, epoch_,
                        static_cast<uint64_t>(plan_.num_experts)};
    cpu::record_fault(workspace_, kMaskedRecord, site, FaultKind::kBadExpert,
                      static_cast<uint64_t>(id), 0);
  }
  return -1;
}

void RankCall::send() {
  std::memset(own().counter(layout_, bank_ ^ 1, MegaMoeCounter::kGridBarriers), 0,
              static_cast<size_t>(layout_.counter_bank));
  if (plan_.dispatch == kPull) {
    std::memcpy(own().token<uint16_t>(plan_, layout_, 0), a_.x.const_data_ptr(),
                static_cast<size_t>(num_tokens_ * plan_.hidden * 2));
  }

  int32_t const per_rank = plan_.experts_per_rank();
  uint32_t* const counts = counter(MegaMoeCounter::kSendCounts);
  uint32_t* const cursors = counter(MegaMoeCounter::kSendCursors);
  for (int64_t i = 0; i < num_tokens_ * plan_.topk; ++i) {
    int32_t const expert = expert_of(i);
    if (expert >= 0) ++counts[expert];
  }
  for (int32_t dst_rank = 0; dst_rank < plan_.world; ++dst_rank) {
    uint32_t* const dst = view(dst_rank).counts(plan_, layout_, bank_, rank_);
    uint32_t first = 0;
    for (int32_t e = 0; e < per_rank; ++e) {
      dst[e] = counts[dst_rank * per_rank + e];
      cursors[dst_rank * per_rank + e] = first;
      first += dst[e];
    }
  }
  for (int64_t i = 0; i < num_tokens_ * plan_.topk; ++i) {
    int32_t const expert = expert_of(i);
    if (expert < 0) continue;
    uint32_t* const routes = view(expert / per_rank).routes(plan_, layout_, bank_, rank_);
    routes[cursors[expert]++] = static_cast<uint32_t>(i);
    if (plan_.dispatch == kPush) push_token(i, expert);
  }
  if (cpu::aborted(workspace_)) return;
  for (int32_t i = 1; i <= plan_.world; ++i) {
    MegaMoeView const dst = view((rank_ + i) % plan_.world);
    cpu::st_release(dst.dispatch_signal(layout_, rank_), workspace_.signal(epoch_));
  }
}

// The place of a choice's token at the owner of the local expert, another rank than its source.
uint16_t* RankCall::pushed_token(int32_t source, int32_t owner, int64_t choice,
                                 int32_t expert) const {
  int32_t const distance = (source - owner + plan_.world) % plan_.world;
  int64_t const place = plan_.token_place(distance, plan_.token_set(expert),
                                          static_cast<int32_t>(choice / plan_.topk));
  return view(owner).token<uint16_t>(plan_, layout_, place);
}

// A token goes to its place at the owner; a second time if it has several choices there.
void RankCall::push_token(int64_t choice, int32_t expert) const {
  int32_t const per_rank = plan_.experts_per_rank();
  int32_t const owner = expert / per_rank;
  if (owner == rank_) return;
  std::memcpy(pushed_token(rank_, owner, choice, expert % per_rank), own_token(choice),
              static_cast<size_t>(plan_.hidden) * 2);
}

// Where this rank finds the token of a choice of a local expert.
uint16_t const* RankCall::received_token(int32_t source, int64_t choice, int32_t expert) const {
  if (plan_.dispatch == kPull) {
    return view(source).token<uint16_t>(plan_, layout_, choice / plan_.topk);
  }
  return source == rank_ ? own_token(choice) : pushed_token(source, rank_, choice, expert);
}

bool RankCall::wait_for_sources() {
  uint64_t const expected = workspace_.signal(epoch_);
  for (int32_t source = 0; source < plan_.world; ++source) {
    uint64_t const* const word = own().dispatch_signal(layout_, source);
    WaitSite site{Phase::kDispatchCounts, source, epoch_, epoch_};
    auto const load = [&] { return signal_epoch(cpu::ld_acquire(word)); };
    if (!cpu::wait_until(workspace_, site, load)) return false;
    uint64_t const seen = cpu::ld_acquire(word);
    if (seen != expected && signal_epoch(seen) == epoch_) {
      site.expected = signal_digest(expected);
      cpu::give_up(workspace_, site, FaultKind::kPlanDiffers, signal_digest(seen), 0);
      return false;
    }
  }
  return true;
}

// The rows of every local expert, and which rows make up which block.
void RankCall::read_counts() {
  int32_t const per_rank = plan_.experts_per_rank();
  rows_.assign(per_rank, 0);
  for (int32_t source = 0; source < plan_.world; ++source) {
    uint32_t const* const counts = own().counts(plan_, layout_, bank_, source);
    for (int32_t e = 0; e < per_rank; ++e) rows_[e] += static_cast<int32_t>(counts[e]);
  }
  for (int32_t e = 0; e < per_rank; ++e) {
    for (int32_t row = 0; row < rows_[e]; row += plan_.block_m) {
      block_expert_.push_back(e);
      block_row_.push_back(row);
    }
  }
  if (a_.expert_load) {
    auto* const load = static_cast<int64_t*>(a_.expert_load->mutable_data_ptr());
    for (int32_t e = 0; e < per_rank; ++e) load[e] += rows_[e];
  }
}

// Copies the tokens of one block, from their sources or from where these have put them.
void RankCall::fill_block(int64_t block) {
  int32_t const expert = block_expert_[block];
  int32_t const rows = min_of(rows_[expert] - block_row_[block], plan_.block_m);
  uint32_t* const origins = own().origins(plan_, layout_, block);
  auto* const to = own().x_block<uint16_t>(plan_, layout_, block);
  for (int32_t r = 0; r < rows; ++r) {
    RowSource const from = row_source(plan_, rank_, block_row_[block] + r, [&](int32_t source) {
      return own().counts(plan_, layout_, bank_, source)[expert];
    });
    uint32_t const* const counts = own().counts(plan_, layout_, bank_, from.source);
    int64_t first = 0;
    for (int32_t e = 0; e < expert; ++e) first += counts[e];
    uint32_t const route = own().routes(plan_, layout_, bank_, from.source)[first + from.index];
    origins[r] = pack_origin(from.source, route);
    uint16_t const* const row = received_token(from.source, route, expert);
    std::memcpy(to + int64_t{1} * r * plan_.hidden, row, static_cast<size_t>(plan_.hidden) * 2);
  }
  counter(MegaMoeCounter::kArrived)[block] = static_cast<uint32_t>(rows);
}

void RankCall::expect(bool holds, char const* what, Tile const& tile) const {
  XS_CHECK(holds, "xstage.megamoe: the schedule is broken: ", what, " (linear ",
           static_cast<int32_t>(tile.phase), ", block ", tile.block, ", n ", tile.n, ")");
}

void RankCall::linear1(Tile const& tile) {
  uint32_t* const done1 = counter(MegaMoeCounter::kLinear1Done);
  uint32_t const* const done2 = counter(MegaMoeCounter::kLinear2Done);
  auto const tiles1 = static_cast<uint32_t>(plan_.linear1_tiles());
  auto const tiles2 = static_cast<uint32_t>(plan_.linear2_tiles());
  while (filled_ <= tile.block) {
    int64_t const old = filled_ - plan_.x_ring_blocks;
    expect(old < 0 || done1[old] == tiles1, "a slot of the x ring is still read", tile);
    fill_block(filled_++);
  }
  int64_t const old = tile.block - plan_.h_ring_blocks;
  expect(old < 0 || done2[old] == tiles2, "a slot of the h ring is still read", tile);

  // Rows of w13 by the plan's weight_layout.
  int64_t const inter = plan_.intermediate;
  int64_t const stride = plan_.weight_layout == kGateUpInTurns ? 2 : 1;
  int64_t const gate0 = plan_.weight_layout == kUpGate ? inter : 0;
  int64_t const up0 = plan_.weight_layout == kGateUp   ? inter
                      : plan_.weight_layout == kUpGate ? 0
                                                       : 1;
  auto const* const w13 = static_cast<uint16_t const*>(a_.w13.const_data_ptr()) +
                          tile.expert * 2 * inter * plan_.hidden;
  auto* const h = own().h_block<uint16_t>(plan_, layout_, tile.block);
  cpu::RowBlock const x(own().x_block<uint16_t>(plan_, layout_, tile.block), tile.rows,
                        plan_.hidden);
  std::vector<float> gate(static_cast<size_t>(tile.rows * cpu::kPanel));
  std::vector<float> up(gate.size());
  int64_t const first = int64_t{1} * tile.n * (plan_.block_n / 2);
  int64_t const last = min_of<int64_t>(first + plan_.block_n / 2, inter);
  for (int64_t column = first; column < last; column += cpu::kPanel) {
    uint16_t const* gate_rows[cpu::kPanel];
    uint16_t const* up_rows[cpu::kPanel];
    int64_t const columns = min_of(cpu::kPanel, last - column);
    for (int64_t c = 0; c < cpu::kPanel; ++c) {
      gate_rows[c] = c < columns ? w13 + (gate0 + (column + c) * stride) * plan_.hidden : nullptr;
      up_rows[c] = c < columns ? w13 + (up0 + (column + c) * stride) * plan_.hidden : nullptr;
    }
    cpu::multiply_panel(x, gate_rows, gate.data());
    cpu::multiply_panel(x, up_rows, up.data());
    for (int64_t r = 0; r < tile.rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        // Rounded to bf16 as an unfused Linear-1 would store them. NaN passes through the clamp.
        float g = cpu::to_float(cpu::to_bf16(gate[r * cpu::kPanel + c]));
        float u = cpu::to_float(cpu::to_bf16(up[r * cpu::kPanel + c]));
        if (g > a_.clamp) g = a_.clamp;
        if (u > a_.clamp) u = a_.clamp;
        if (u < -a_.clamp) u = -a_.clamp;
        h[r * inter + column + c] = cpu::to_bf16(g / (1.0f + std::exp(-g)) * u);
      }
    }
  }
  ++done1[tile.block];
}

void RankCall::linear2(Tile const& tile) {
  uint32_t const* const done1 = counter(MegaMoeCounter::kLinear1Done);
  uint32_t* const done2 = counter(MegaMoeCounter::kLinear2Done);
  expect(done1[tile.block] == static_cast<uint32_t>(plan_.linear1_tiles()),
         "Linear-2 before its Linear-1", tile);
  auto const* const w2 = static_cast<uint16_t const*>(a_.w2.const_data_ptr()) +
                         int64_t{1} * tile.expert * plan_.hidden * plan_.intermediate;
  uint32_t const* const origins = own().origins(plan_, layout_, tile.block);
  cpu::RowBlock const h(own().h_block<uint16_t>(plan_, layout_, tile.block), tile.rows,
                        plan_.intermediate);
  std::vector<float> sums(static_cast<size_t>(tile.rows * cpu::kPanel));
  int64_t const first = int64_t{1} * tile.n * plan_.block_n;
  int64_t const last = min_of<int64_t>(first + plan_.block_n, plan_.hidden);
  for (int64_t column = first; column < last; column += cpu::kPanel) {
    uint16_t const* w2_rows[cpu::kPanel];
    int64_t const columns = min_of(cpu::kPanel, last - column);
    for (int64_t c = 0; c < cpu::kPanel; ++c) {
      w2_rows[c] = c < columns ? w2 + (column + c) * plan_.intermediate : nullptr;
    }
    cpu::multiply_panel(h, w2_rows, sums.data());
    for (int64_t r = 0; r < tile.rows; ++r) {
      uint32_t const route = origin_route(origins[r]);
      auto* const to =
          view(origin_source(origins[r]))
              .combine_row<uint16_t>(plan_, layout_, route % plan_.topk, route / plan_.topk);
      for (int64_t c = 0; c < columns; ++c) {
        to[column + c] = cpu::to_bf16(sums[r * cpu::kPanel + c]);
      }
    }
  }
  ++done2[tile.block];
}

void RankCall::compute() {
  alive_ = wait_for_sources();
  if (alive_) {
    read_counts();
    TileCursor<int32_t const*> cursor(plan_, rows_.data());
    for (int32_t index = 0; cursor.seek(index); ++index) {
      for (int32_t cta = 0; cta < plan_.cluster_size; ++cta) {
        Tile const tile = cursor.tile(cta);
        if (tile.phase == TilePhase::kLinear1) linear1(tile);
        if (tile.phase == TilePhase::kLinear2) linear2(tile);
      }
    }
  }
  cpu::publish(workspace_, epoch_);
}

// y = scale * (((0 + w0 * r0) + w1 * r1) + ...), fp32, slots in ascending order. Rows that are not
// tokens are zero; when the call failed, every row is NaN.
void RankCall::combine() {
  alive_ = cpu::wait_for_ranks(workspace_, epoch_, Phase::kCombineArrival) && alive_;
  auto* const y = static_cast<uint16_t*>(a_.y.mutable_data_ptr());
  if (!alive_) {
    std::memset(y, 0xff, static_cast<size_t>(a_.tokens() * plan_.hidden * 2));
    return;
  }
  auto const* const weights = static_cast<float const*>(a_.topk_weights.const_data_ptr());
  std::vector<float> sum(static_cast<size_t>(plan_.hidden));
  for (int64_t token = 0; token < a_.tokens(); ++token) {
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int32_t slot = 0; token < num_tokens_ && slot < plan_.topk; ++slot) {
      int64_t const choice = token * plan_.topk + slot;
      if (expert_of(choice) < 0) continue;  // its weight may be anything, NaN too
      uint16_t const* const row = own().combine_row<uint16_t>(plan_, layout_, slot, token);
      for (int32_t c = 0; c < plan_.hidden; ++c) {
        sum[c] += weights[choice] * cpu::to_float(row[c]);
      }
    }
    for (int32_t c = 0; c < plan_.hidden; ++c) {
      y[token * plan_.hidden + c] = cpu::to_bf16(sum[c] * a_.routed_scaling_factor);
    }
  }
}

// Each step runs for all ranks that this call plays before the next: virtual ranks share a thread.
void run(std::vector<MegaMoeArguments> const& arguments) {
  std::vector<RankCall> calls(arguments.begin(), arguments.end());
  for (RankCall& call : calls) call.send();
  for (RankCall& call : calls) call.compute();
  for (RankCall& call : calls) call.combine();
}

using Ops = MegaMoeOps<run>;

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(xstage, CPU, m) {
  m.impl("megamoe", TORCH_BOX(&Ops::megamoe));
  m.impl("megamoe_out", TORCH_BOX(&Ops::megamoe_out));
  m.impl("megamoe_virtual", TORCH_BOX(&Ops::megamoe_virtual));
}

}  // namespace xstage
