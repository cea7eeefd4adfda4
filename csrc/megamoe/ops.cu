// The megamoe operators on CUDA: checks with values, parameters, launch.
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#include "common/torch_glue.h"
#include "launch.h"
#include "trace_format.h"

namespace xstage {
namespace {

// The tensors of one rank, as the schema names them.
struct RankTensors {
  Tensor const& x;
  Tensor const& topk_idx;
  Tensor const& topk_weights;
  Tensor const& w13;
  Tensor const& w2;
};

struct CallOptions {
  std::optional<double> clamp;
  double routed_scaling_factor;
};

void check_tensor(char const* name, Tensor const& tensor, ScalarType dtype, int32_t device,
                  std::initializer_list<int64_t> shape) {
  check_dtype("megamoe", name, tensor, dtype);
  check_shape("megamoe", name, tensor, shape);
  check_contiguous("megamoe", name, tensor);
  XS_CHECK(tensor.is_cuda() && tensor.get_device_index() == device, "xstage.megamoe: ", name,
           ": expected a tensor on cuda:", device);
  XS_CHECK(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0 || tensor.numel() == 0,
           "xstage.megamoe: ", name, ": expected an address that is a multiple of 16; clone it");
}

void check_tensors(MegaMoePlan const& plan, RankTensors const& given, Tensor const& y) {
  int32_t const device = given.x.get_device_index();
  int64_t const hidden = plan.hidden;
  int64_t const intermediate = plan.intermediate;
  int64_t const experts = plan.experts_per_rank();
  check_tensor("x", given.x, ScalarType::BFloat16, device, {-1, hidden});
  int64_t const rows = given.x.size(0);
  XS_CHECK(rows <= plan.max_tokens, "xstage.megamoe: x: expected at most ", plan.max_tokens,
           " tokens (plan.max_tokens), got ", rows);
  ScalarType const ids = given.topk_idx.scalar_type();
  XS_CHECK(ids == ScalarType::Int || ids == ScalarType::Long,
           "xstage.megamoe: topk_idx: expected int32 or int64, got ", dtype_name(ids));
  check_tensor("topk_idx", given.topk_idx, ids, device, {rows, plan.topk});
  check_tensor("topk_weights", given.topk_weights, ScalarType::Float, device, {rows, plan.topk});
  check_tensor("w13", given.w13, ScalarType::BFloat16, device, {experts, 2 * intermediate, hidden});
  check_tensor("w2", given.w2, ScalarType::BFloat16, device, {experts, hidden, intermediate});
  check_tensor("out", y, ScalarType::BFloat16, device, {rows, hidden});
}

MegaMoeParams rank_params(MegaMoePlan const& plan, Workspace const& workspace,
                          RankTensors const& given, Tensor const& y, CallOptions const& options) {
  check_tensors(plan, given, y);
  MegaMoeLayout const layout(plan);
  XS_CHECK(workspace.memory == static_cast<int64_t>(MemoryKind::kCuda),
           "xstage.megamoe: workspace: expected CUDA memory, got CPU memory");
  XS_CHECK(workspace.world == plan.world, "xstage.megamoe: workspace: expected a group of ",
           plan.world, " (plan.world), got ", workspace.world);
  XS_CHECK(workspace.region_bytes >= layout.total, "xstage.megamoe: workspace: the plan needs ",
           layout.total, " bytes, the region has ", workspace.region_bytes);
  MegaMoeParams params{{}, {}, {}, {}, plan, layout, workspace};
  params.x = static_cast<__nv_bfloat16 const*>(given.x.data_ptr());
  params.topk_idx = given.topk_idx.data_ptr();
  params.idx_is_64 = given.topk_idx.scalar_type() == ScalarType::Long;
  params.topk_weights = static_cast<float const*>(given.topk_weights.data_ptr());
  params.y = static_cast<__nv_bfloat16*>(y.mutable_data_ptr());
  params.rows = static_cast<int32_t>(given.x.size(0));
  params.clamp = static_cast<float>(options.clamp.value_or(std::numeric_limits<float>::infinity()));
  params.routed_scale = static_cast<float>(options.routed_scaling_factor);
  encode_megamoe_maps(params, given.w13.data_ptr(), given.w2.data_ptr());
  return params;
}

void run(Tensor const& y, RankTensors const& given, std::vector<int64_t> const& plan_words,
         std::vector<int64_t> const& workspace_words, std::optional<Tensor> const& num_tokens,
         CallOptions const& options, std::optional<Tensor> const& expert_load) {
  int32_t const device = given.x.get_device_index();
  MegaMoePlan const plan = read_megamoe_plan(plan_words);
  check_megamoe_instance(plan);
  MegaMoeParams params = rank_params(plan, read_workspace(workspace_words), given, y, options);
  if (num_tokens.has_value()) {
    check_dtype("megamoe", "num_tokens", *num_tokens, ScalarType::Int);
    XS_CHECK(num_tokens->numel() == 1 && num_tokens->get_device_index() == device,
             "xstage.megamoe: num_tokens: expected one int32 on cuda:", device, ", got shape ",
             shape_text(*num_tokens));
    params.num_tokens = static_cast<int32_t const*>(num_tokens->data_ptr());
  }
  if (expert_load.has_value()) {
    check_tensor("expert_load", *expert_load, ScalarType::Long, device, {plan.experts_per_rank()});
    params.expert_load = static_cast<int64_t*>(expert_load->mutable_data_ptr());
  }
  launch_megamoe({params}, current_stream(given.x));
}

Tensor megamoe(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor w13, Tensor w2,
               std::vector<int64_t> plan, std::vector<int64_t> workspace,
               std::optional<Tensor> num_tokens, std::optional<double> clamp,
               double routed_scaling_factor, std::optional<Tensor> expert_load) {
  DeviceGuard const guard(x.get_device_index());
  Tensor y = torch::stable::empty_like(x);
  run(y, {x, topk_idx, topk_weights, w13, w2}, plan, workspace, num_tokens,
      {clamp, routed_scaling_factor}, expert_load);
  return y;
}

void megamoe_out(Tensor out, Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor w13, Tensor w2,
                 std::vector<int64_t> plan, std::vector<int64_t> workspace,
                 std::optional<Tensor> num_tokens, std::optional<double> clamp,
                 double routed_scaling_factor, std::optional<Tensor> expert_load) {
  DeviceGuard const guard(x.get_device_index());
  run(out, {x, topk_idx, topk_weights, w13, w2}, plan, workspace, num_tokens,
      {clamp, routed_scaling_factor}, expert_load);
}

std::vector<Tensor> megamoe_virtual(std::vector<Tensor> x, std::vector<Tensor> topk_idx,
                                    std::vector<Tensor> topk_weights, std::vector<Tensor> w13,
                                    std::vector<Tensor> w2, std::vector<int64_t> plan_words,
                                    std::vector<int64_t> workspace_words,
                                    std::optional<double> clamp, double routed_scaling_factor) {
  MegaMoePlan const plan = read_megamoe_plan(plan_words);
  check_megamoe_instance(plan);
  std::vector<Workspace> const workspaces = read_virtual_workspaces(workspace_words);
  size_t const world = workspaces.size();
  XS_CHECK(x.size() == world && topk_idx.size() == world && topk_weights.size() == world &&
               w13.size() == world && w2.size() == world,
           "xstage.megamoe_virtual: expected lists of ", world, " tensors, got ", x.size(), ", ",
           topk_idx.size(), ", ", topk_weights.size(), ", ", w13.size(), ", ", w2.size());
  DeviceGuard const guard(x[0].get_device_index());
  std::vector<Tensor> y;
  std::vector<MegaMoeParams> params;
  for (size_t r = 0; r < world; ++r) {
    y.push_back(torch::stable::empty_like(x[r]));
    params.push_back(rank_params(plan, workspaces[r],
                                 {x[r], topk_idx[r], topk_weights[r], w13[r], w2[r]}, y[r],
                                 {clamp, routed_scaling_factor}));
  }
  launch_megamoe(params, current_stream(x[0]));
  return y;
}

std::tuple<Tensor, Tensor> megamoe_traced(Tensor x, Tensor topk_idx, Tensor topk_weights,
                                          Tensor w13, Tensor w2, std::vector<int64_t> plan_words,
                                          std::vector<int64_t> workspace, int64_t records) {
  XS_CHECK(records >= 1 && records <= (1 << 20), "xstage.megamoe_traced: records: expected 1 to ",
           1 << 20, ", got ", records);
  DeviceGuard const guard(x.get_device_index());
  MegaMoePlan const plan = read_megamoe_plan(plan_words);
  check_megamoe_instance(plan);
  Tensor y = torch::stable::empty_like(x);
  std::vector<int64_t> const shape{plan.num_sms, kTraceTracks, records, kTraceWords};
  Tensor buffer = torch::stable::new_empty(x, shape, ScalarType::Long);
  Tensor trace = torch::stable::zero_(buffer);
  MegaMoeParams params = rank_params(plan, read_workspace(workspace),
                                     {x, topk_idx, topk_weights, w13, w2}, y, {std::nullopt, 1.0});
  params.trace = static_cast<int64_t*>(trace.mutable_data_ptr());
  params.trace_records = static_cast<int32_t>(records);
  launch_megamoe({params}, current_stream(x));
  return {y, trace};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(xstage, CUDA, m) {
  m.impl("megamoe", TORCH_BOX(&megamoe));
  m.impl("megamoe_out", TORCH_BOX(&megamoe_out));
  m.impl("megamoe_virtual", TORCH_BOX(&megamoe_virtual));
  m.impl("megamoe_traced", TORCH_BOX(&megamoe_traced));
}

STABLE_TORCH_LIBRARY_IMPL(xstage, CompositeExplicitAutograd, m) {
  m.impl("megamoe_instances", TORCH_BOX(&megamoe_instances));
}

}  // namespace xstage
