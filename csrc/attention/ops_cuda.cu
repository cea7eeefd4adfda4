#include <cmath>

#include "common/channel_kernels.h"
#include "operand_maps.h"
#include "ops_cuda.h"
#include "stream_order.h"

namespace xstage::cuda {
namespace {

constexpr int64_t kWarpgroupRows = 64;  // box of q, and the most rows of a slice

// One rank's operands, checked, where TMA can load them.
struct Prepared {
  RankOperands operands;
  AttentionProblem problem;
};

Prepared prepare(char const* op, RankOperands const& operands, AttentionOptions const& options,
                 int64_t kv_group, int64_t head_phase) {
  ScalarType const type = operands.q.scalar_type();
  XS_CHECK(type == ScalarType::BFloat16 || type == ScalarType::Half, "xstage.", op,
           ": q: expected bfloat16 or float16 on CUDA, got ", dtype_name(type));
  AttentionProblem const shape =
      make_problem(op, operands.q, operands.k, operands.v, options, kv_group, head_phase);
  XS_CHECK(shape.head_dim == 64 || shape.head_dim == 128, "xstage.", op,
           ": q: expected a head size of 64 or 128, got ", shape.head_dim);
  // A reference at or below a row's maximum needs products that grow with the scores.
  XS_CHECK(shape.scale > 0.0f && std::isfinite(shape.scale), "xstage.", op,
           ": scale: expected a positive number, got ", shape.scale);
  return {{mappable(operands.q), mappable(operands.k), mappable(operands.v)}, shape};
}

Instance const& choose_instance(char const* op, Generation const& generation,
                                AttentionProblem const& problem, AttentionPlan const& plan) {
  std::string compiled;
  for (Instance const& instance : generation) {
    if (instance.dtype != problem.dtype || instance.head_dim != problem.head_dim ||
        instance.causal != problem.causal) {
      continue;
    }
    bool const fits = (plan.block_m == 0 || plan.block_m == instance.block_m) &&
                      (plan.block_n == 0 || plan.block_n == instance.block_n);
    if (fits) return instance;
    compiled += concat(compiled.empty() ? "" : ", ", instance.block_m, "x", instance.block_n);
  }
  XS_CHECK(false, "xstage.", op, ": plan: tiles: expected one of ", compiled, " for head size ",
           problem.head_dim, problem.causal ? " causal" : "", ", got ", plan.block_m, "x",
           plan.block_n);
  return generation.front();
}

int multiprocessor_count(int device) {
  int count = 0;
  XS_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// Everything but outputs and workspace.
AttentionParams make_params(Prepared const& prepared, Instance const& instance,
                            AttentionPlan const& plan, TileSchedule const& schedule,
                            AttentionOptions const& options, Tensor const& lse) {
  AttentionProblem const& problem = prepared.problem;
  AttentionParams params{};
  params.q = encode_input(prepared.operands.q, kWarpgroupRows);
  params.k = encode_input(prepared.operands.k, instance.block_n);
  params.v = encode_input(prepared.operands.v, instance.block_n);
  params.schedule = schedule;
  params.keys = {static_cast<int32_t>(problem.num_query_rows),
                 static_cast<int32_t>(problem.num_keys),
                 options.key_segments.has_value()
                     ? static_cast<int32_t const*>(options.key_segments->const_data_ptr())
                     : nullptr,
                 static_cast<int32_t>(problem.num_segments)};
  params.scale_log2 = problem.scale * 1.44269504f;
  params.kv_group = static_cast<int32_t>(problem.kv_group);
  params.head_phase = static_cast<int32_t>(problem.head_phase);
  params.lse = problem.want_lse ? static_cast<float*>(lse.mutable_data_ptr()) : nullptr;
  // Every warpgroup sends its share of a slice: whole swizzle groups of 8 rows.
  int64_t const share = plan.slice_bytes / (instance.block_m / kWarpgroupRows);
  int64_t const slice_rows = share / (problem.head_dim * 2) / 8 * 8;
  params.slice_rows = static_cast<int32_t>(
      plan.slice_bytes == 0 ? kWarpgroupRows
                            : min_of(kWarpgroupRows, max_of<int64_t>(8, slice_rows)));
  params.slice_steps =
      plan.slice_bytes == 0 ? 0 : static_cast<int32_t>(max_of<int64_t>(1, plan.slice_steps));
  params.wait_every_tile = plan.completion == static_cast<int64_t>(Completion::kEveryTile);
  return params;
}

// Batch, rows and heads of what a rank receives, and which of its heads this rank writes.
struct OutputShape {
  int64_t batch;
  int64_t rows;
  int64_t heads;
  int64_t head_dim;
};

CUtensorMap encode_output(char* base, OutputShape const& shape, HeadRange written,
                          int64_t slice_rows) {
  OperandStrides const strides{shape.rows * shape.heads * shape.head_dim,
                               shape.heads * shape.head_dim, shape.head_dim};
  return encode_operand(base + written.first * shape.head_dim * 2,
                        {shape.head_dim, written.count, shape.rows, shape.batch}, strides,
                        slice_rows);
}

int num_blocks(AttentionPlan const& plan, TileSchedule const& schedule, Tensor const& q) {
  int64_t const sms = multiprocessor_count(q.get_device_index());
  int64_t const wanted = plan.num_sms == 0 ? sms : min_of(plan.num_sms, sms);
  // A rank without tiles still takes part in the end of the call.
  return static_cast<int>(max_of<int64_t>(1, min_of(wanted, schedule.size())));
}

void launch(Instance const& instance, AttentionParams& params, AttentionPlan const& plan,
            Tensor const& q, LaunchKind kind) {
  int const blocks = num_blocks(plan, params.schedule, q);
  params.num_rounds = static_cast<int32_t>(ceil_div(params.schedule.size(), int64_t{blocks}));
  instance.launch(params, blocks, current_stream(q), kind);
}

Tensor new_lse(AttentionProblem const& problem, Tensor const& like) {
  std::vector<int64_t> size = {0};
  if (problem.want_lse) size = {problem.batch, problem.num_heads, problem.num_query_rows};
  return torch::stable::new_empty(like, {size.data(), size.size()}, ScalarType::Float);
}

void check_store_path(char const* op, AttentionPlan const& plan) {
  XS_CHECK(plan.store_path == static_cast<int64_t>(StorePath::kTensor), "xstage.", op,
           ": plan: store_path: expected 0 (tensor stores), got ", plan.store_path);
}

}  // namespace

std::tuple<Tensor, Tensor> attention(char const* op, Generation const& generation, Tensor const& q,
                                     Tensor const& k, Tensor const& v,
                                     AttentionOptions const& options, int64_t head_phase,
                                     std::vector<int64_t> const& plan_words) {
  AttentionPlan plan =
      plan_words.empty() ? single_rank_plan(op, q, k) : read_attention_plan(plan_words);
  XS_CHECK(plan.world == 1, "xstage.", op, ": plan: expected one of 1 rank, got one of ",
           plan.world, "; ", op, " computes on its own rank only");
  check_store_path(op, plan);
  if (plan_words.empty() && options.causal) {
    plan.tile_order = static_cast<int64_t>(TileOrder::kLongestFirst);
  }
  DeviceGuard const guard(q.get_device_index());
  Prepared const prepared = prepare(op, {q, k, v}, options, plan.kv_group, head_phase);
  AttentionProblem const& problem = prepared.problem;
  AttentionLayout const layout = make_layout(plan);
  check_against_plan(op, problem, layout, 0);
  Instance const& instance = choose_instance(op, generation, problem, plan);
  TileSchedule const schedule =
      make_schedule(layout, 0, static_cast<int32_t>(problem.batch), instance.block_m,
                    static_cast<TileOrder>(plan.tile_order));

  OutputShape const shape{problem.batch, problem.num_query_rows, problem.num_heads,
                          problem.head_dim};
  std::vector<int64_t> const size = {shape.batch, shape.rows, shape.heads, shape.head_dim};
  Tensor out = torch::stable::new_empty(q, {size.data(), size.size()});
  Tensor lse = new_lse(problem, q);
  if (schedule.size() == 0) return {out, lse};
  AttentionParams params = make_params(prepared, instance, plan, schedule, options, lse);
  params.out[0] = encode_output(static_cast<char*>(out.mutable_data_ptr()), shape,
                                layout.query_heads(0), params.slice_rows);
  launch(instance, params, plan, q, LaunchKind::kEarly);
  return {out, lse};
}

namespace {

// A call in the order of its steps: everything that can be refused comes before the slots.
struct A2aCall {
  RingCall ring;
  std::vector<Prepared> ranks;
  Instance const* instance;
};

A2aCall open(char const* op, Generation const& generation,
             std::vector<RankOperands> const& operands, AttentionOptions const& options,
             std::vector<int64_t> const& plan_words, std::vector<Workspace> const& workspaces) {
  A2aCall call{open_call(op, plan_words, workspaces, MemoryKind::kCuda), {}, nullptr};
  AttentionPlan const& plan = call.ring.plan;
  check_store_path(op, plan);
  for (size_t i = 0; i < operands.size(); ++i) {
    int const rank = call.ring.ranks[i].rank();
    call.ranks.push_back(
        prepare(op, operands[i], options, plan.kv_group, call.ring.layout.head_phase(rank)));
    AttentionProblem const& problem = call.ranks.back().problem;
    AttentionProblem const& first = call.ranks.front().problem;
    check_against_plan(op, problem, call.ring.layout, rank);
    XS_CHECK(problem.batch == first.batch && problem.head_dim == first.head_dim &&
                 problem.dtype == first.dtype,
             "xstage.", op, ": q: expected the same batch, head size and dtype on all ranks, got ",
             shape_text(operands[i].q), " beside ", shape_text(operands.front().q));
  }
  call.instance = &choose_instance(op, generation, call.ranks.front().problem, plan);
  return call;
}

void launch_rank(A2aCall const& call, size_t i, AttentionOptions const& options,
                 Tensor const& lse) {
  RankCall const& rank = call.ring.ranks[i];
  Prepared const& prepared = call.ranks[i];
  AttentionPlan const& plan = call.ring.plan;
  AttentionLayout const& layout = call.ring.layout;
  AttentionProblem const& problem = prepared.problem;
  TileSchedule const schedule =
      make_schedule(layout, rank.rank(), static_cast<int32_t>(problem.batch),
                    call.instance->block_m, static_cast<TileOrder>(plan.tile_order));
  AttentionParams params = make_params(prepared, *call.instance, plan, schedule, options, lse);
  for (int owner = 0; owner < layout.world; ++owner) {
    OutputShape const shape{problem.batch, layout.rows.count(owner), layout.heads.total(),
                            problem.head_dim};
    params.out[owner] = encode_output(call.ring.slot(rank, owner), shape,
                                      layout.query_heads(rank.rank()), params.slice_rows);
  }
  params.workspace = rank.workspace;
  params.refused = failure_byte(rank.workspace);
  // Virtual ranks run one after the other; the first one overlaps with the grant.
  launch(*call.instance, params, plan, prepared.operands.q,
         i == 0 ? LaunchKind::kEarly : LaunchKind::kOrdinary);
}

}  // namespace

std::vector<RankResult> attention_a2a(char const* op, Generation const& generation,
                                      std::vector<RankOperands> const& operands,
                                      AttentionOptions const& options,
                                      std::vector<int64_t> const& plan_words,
                                      std::vector<Workspace> const& workspaces) {
  Tensor const& like = operands.front().q;
  DeviceGuard const guard(like.get_device_index());
  cudaStream_t const stream = current_stream(like);
  A2aCall call = open(op, generation, operands, options, plan_words, workspaces);
  AttentionProblem const& problem = call.ranks.front().problem;
  int64_t const row_bytes = problem.head_dim * element_bytes(problem.dtype);
  take_slots(op, call.ring, output_slot_bytes(call.ring.layout, problem.batch, row_bytes),
             is_capturing(stream));
  mix_call(call.ring, plan_words, agreed_facts(problem));

  std::vector<RankResult> results;
  std::vector<PoisonRange> poison;
  for (size_t i = 0; i < call.ranks.size(); ++i) {
    RankCall const& rank = call.ring.ranks[i];
    int64_t const rows = call.ring.layout.rows.count(rank.rank());
    int64_t const heads = call.ring.layout.heads.total();
    Tensor out =
        slot_tensor(rank.workspace, rank.taken, call.ring.ring.offset(rank.taken.slot),
                    {problem.batch, rows, heads, problem.head_dim}, problem.dtype, like.device());
    poison.push_back({out.mutable_data_ptr(), problem.batch * rows * heads * row_bytes});
    results.push_back({out, new_lse(call.ranks[i].problem, like)});
  }
  follow_last_stream(call.ring, stream);
  launch_grant_slot(call.ring.workspaces(), call.ring.slot_index(), call.ring.free_slots(), stream);
  for (size_t i = 0; i < call.ranks.size(); ++i) {
    launch_rank(call, i, options, results[i].lse);
  }
  launch_wait_beside(call.ring.workspaces(), Phase::kA2aArrival, call.ring.slot_index(), poison,
                     stream);
  return results;
}

}  // namespace xstage::cuda
