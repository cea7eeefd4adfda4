#include "ops_cpu.h"

namespace xstage::cpu {

std::tuple<Tensor, Tensor> CpuKernels::attention(char const* op, Tensor const& q, Tensor const& k,
                                                 Tensor const& v, AttentionOptions const& options,
                                                 int64_t head_phase,
                                                 std::vector<int64_t> const& plan_words) {
  AttentionPlan const plan =
      plan_words.empty() ? single_rank_plan(op, q, k) : read_attention_plan(plan_words);
  XS_CHECK(plan.world == 1, "xstage.", op, ": plan: expected one of 1 rank, got one of ",
           plan.world, "; ", op, " computes on its own rank only");
  check_float_dtype(op, "q", q);
  Tensor const q_unit = unit_last_stride(q);
  Tensor const k_unit = unit_last_stride(k);
  Tensor const v_unit = unit_last_stride(v);
  AttentionProblem const problem =
      make_problem(op, q_unit, k_unit, v_unit, options, plan.kv_group, head_phase);
  AttentionLayout const layout = make_layout(plan);
  check_against_plan(op, problem, layout, 0);

  std::vector<int64_t> const size = {q.size(0), q.size(1), q.size(2), q.size(3)};
  Tensor out = torch::stable::new_empty(q, {size.data(), size.size()});
  Tensor lse = new_lse(problem, q);
  AttendArguments arguments{
      q_unit.const_data_ptr(), k_unit.const_data_ptr(),
      v_unit.const_data_ptr(), segment_data(options),
      lse_data(problem, lse),  {{out.mutable_data_ptr()}, layout.rows, problem.num_heads, 0}};
  attend(problem,
         make_schedule(layout, 0, static_cast<int32_t>(problem.batch), block_rows(plan),
                       static_cast<TileOrder>(plan.tile_order)),
         arguments);
  return {out, lse};
}

namespace {

struct CheckedRank {
  RankOperands operands;  // last stride 1
  AttentionProblem problem;
};

CheckedRank check_rank(char const* op, RankOperands const& operands,
                       AttentionOptions const& options, RingCall const& call, int rank) {
  check_float_dtype(op, "q", operands.q);
  RankOperands const unit{unit_last_stride(operands.q), unit_last_stride(operands.k),
                          unit_last_stride(operands.v)};
  AttentionProblem const problem = make_problem(op, unit.q, unit.k, unit.v, options,
                                                call.plan.kv_group, call.layout.head_phase(rank));
  check_against_plan(op, problem, call.layout, rank);
  return {unit, problem};
}

void compute_rank(RingCall const& call, RankCall const& rank, CheckedRank const& checked,
                  AttentionOptions const& options, Tensor const& lse) {
  AttendArguments arguments{
      checked.operands.q.const_data_ptr(),
      checked.operands.k.const_data_ptr(),
      checked.operands.v.const_data_ptr(),
      segment_data(options),
      lse_data(checked.problem, lse),
      {{}, call.layout.rows, call.layout.heads.total(), call.layout.heads.begin(rank.rank())}};
  for (int r = 0; r < call.layout.world; ++r) arguments.out.base[r] = call.slot(rank, r);
  attend(checked.problem,
         make_schedule(call.layout, rank.rank(), static_cast<int32_t>(checked.problem.batch),
                       block_rows(call.plan), static_cast<TileOrder>(call.plan.tile_order)),
         arguments);
}

}  // namespace

// Every step runs for all ranks of this process before the next one: virtual ranks share a thread.
std::vector<RankResult> CpuKernels::attention_a2a(char const* op,
                                                  std::vector<RankOperands> const& operands,
                                                  AttentionOptions const& options,
                                                  std::vector<int64_t> const& plan_words,
                                                  std::vector<Workspace> const& workspaces) {
  RingCall call = open_call(op, plan_words, workspaces, MemoryKind::kCpu);
  std::vector<CheckedRank> checked;
  for (size_t i = 0; i < operands.size(); ++i) {
    checked.push_back(check_rank(op, operands[i], options, call, call.ranks[i].rank()));
  }
  AttentionProblem const& problem = checked.front().problem;
  for (CheckedRank const& rank : checked) {
    XS_CHECK(rank.problem.batch == problem.batch && rank.problem.head_dim == problem.head_dim &&
                 rank.problem.dtype == problem.dtype,
             "xstage.", op, ": q: expected the same batch, head size and dtype on all ranks, got ",
             shape_text(rank.operands.q), " beside ", shape_text(checked.front().operands.q));
  }
  int64_t const row_bytes = problem.head_dim * element_bytes(problem.dtype);
  take_slots(op, call, output_slot_bytes(call.layout, problem.batch, row_bytes), false);
  mix_call(call, plan_words, agreed_facts(problem));

  for (RankCall const& rank : call.ranks) {
    announce_slots(rank.workspace, rank.taken.slot, call.free_slots());
  }
  std::vector<RankResult> results;
  for (size_t i = 0; i < call.ranks.size(); ++i) {
    RankCall const& rank = call.ranks[i];
    int64_t const rows = call.layout.rows.count(rank.rank());
    Tensor const& like = checked[i].operands.q;
    Tensor out = slot_tensor(rank.workspace, rank.taken, call.ring.offset(rank.taken.slot),
                             {problem.batch, rows, call.layout.heads.total(), problem.head_dim},
                             problem.dtype, like.device());
    results.push_back({std::move(out), new_lse(checked[i].problem, like)});
    if (wait_for_slot(rank.workspace, rank.taken.slot)) {
      compute_rank(call, rank, checked[i], options, results.back().lse);
    }
  }
  for (RankCall const& rank : call.ranks) publish(rank.workspace, call_epoch(rank.workspace));
  for (size_t i = 0; i < call.ranks.size(); ++i) {
    Workspace const& workspace = call.ranks[i].workspace;
    if (!wait_for_ranks(workspace, call_epoch(workspace) - 1, Phase::kA2aArrival)) {
      std::memset(results[i].out.mutable_data_ptr(), 0xff,
                  static_cast<size_t>(results[i].out.numel() * element_bytes(problem.dtype)));
    }
  }
  return results;
}

}  // namespace xstage::cpu
