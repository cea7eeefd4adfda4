// The megamoe operators on CUDA: arguments (checked in arguments.h), parameters, launch.
#include <optional>
#include <tuple>

#include "arguments.h"
#include "launch.h"
#include "trace_format.h"

namespace xstage {
namespace {

// What the kernel gets for one rank.
MegaMoeParams rank_params(MegaMoeArguments const& a) {
  // TMA loads and 16-byte accesses; torch's own allocations are aligned to more.
  for (Tensor const* tensor : {&a.x, &a.w13, &a.w2, &a.y}) {
    XS_CHECK(reinterpret_cast<uintptr_t>(tensor->data_ptr()) % 16 == 0,
             "xstage.megamoe: x, w13, w2, out: expected addresses that are multiples of 16; clone "
             "the tensor of shape ",
             shape_text(*tensor));
  }
  MegaMoeParams params{{}, {}, {}, {}, a.plan, MegaMoeLayout(a.plan), a.workspace};
  params.x = static_cast<__nv_bfloat16 const*>(a.x.data_ptr());
  params.topk_idx = a.topk_idx.data_ptr();
  params.idx_is_64 = a.topk_idx.scalar_type() == ScalarType::Long;
  params.topk_weights = static_cast<float const*>(a.topk_weights.data_ptr());
  params.y = static_cast<__nv_bfloat16*>(a.y.mutable_data_ptr());
  params.rows = static_cast<int32_t>(a.tokens());
  params.clamp = a.clamp;
  params.routed_scale = a.routed_scaling_factor;
  if (a.num_tokens) {
    params.num_tokens = a.num_tokens->data_ptr();
    params.num_tokens_is_64 = a.num_tokens->scalar_type() == ScalarType::Long;
  }
  if (a.expert_load) {
    params.expert_load = static_cast<int64_t*>(a.expert_load->mutable_data_ptr());
  }
  encode_megamoe_maps(params, a.w13.data_ptr(), a.w2.data_ptr());
  return params;
}

void run(char const* op, MegaMoeArguments& a, MegaMoeOptions const& options) {
  check_megamoe_instance(a.plan);
  set_options(a, options);
  check_arguments(op, a, MemoryKind::kCuda);
  launch_megamoe({rank_params(a)}, current_stream(a.x));
}

Tensor megamoe(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor w13, Tensor w2,
               std::vector<int64_t> plan, std::vector<int64_t> workspace,
               std::optional<Tensor> num_tokens, std::optional<double> clamp,
               double routed_scaling_factor, std::optional<Tensor> expert_load) {
  DeviceGuard const guard(x.get_device_index());
  MegaMoePlan const read = read_megamoe_plan(plan);
  check_shape("megamoe", "x", x, {-1, read.hidden});
  Tensor y = torch::stable::new_empty(x, {x.size(0), read.hidden});
  MegaMoeArguments a{read, read_workspace(workspace), x, topk_idx, topk_weights, w13, w2, y};
  run("megamoe", a, {num_tokens, clamp, routed_scaling_factor, expert_load});
  return y;
}

void megamoe_out(Tensor out, Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor w13, Tensor w2,
                 std::vector<int64_t> plan, std::vector<int64_t> workspace,
                 std::optional<Tensor> num_tokens, std::optional<double> clamp,
                 double routed_scaling_factor, std::optional<Tensor> expert_load) {
  DeviceGuard const guard(x.get_device_index());
  MegaMoeArguments a{
      read_megamoe_plan(plan), read_workspace(workspace), x, topk_idx, topk_weights, w13, w2, out};
  run("megamoe_out", a, {num_tokens, clamp, routed_scaling_factor, expert_load});
}

std::vector<Tensor> megamoe_virtual(std::vector<Tensor> x, std::vector<Tensor> topk_idx,
                                    std::vector<Tensor> topk_weights, std::vector<Tensor> w13,
                                    std::vector<Tensor> w2, std::vector<int64_t> plan,
                                    std::vector<int64_t> workspaces, std::optional<double> clamp,
                                    double routed_scaling_factor) {
  XS_CHECK(!x.empty(), "xstage.megamoe_virtual: x: expected one tensor per rank, got none");
  DeviceGuard const guard(x[0].get_device_index());
  check_megamoe_instance(read_megamoe_plan(plan));
  MegaMoeOptions const options{std::nullopt, clamp, routed_scaling_factor, std::nullopt};
  std::vector<MegaMoeArguments> const all = virtual_arguments(
      {x, topk_idx, topk_weights, w13, w2}, plan, workspaces, options, MemoryKind::kCuda);
  std::vector<Tensor> y;
  std::vector<MegaMoeParams> ranks;
  for (MegaMoeArguments const& a : all) {
    y.push_back(a.y);
    ranks.push_back(rank_params(a));
  }
  launch_megamoe(ranks, current_stream(x[0]));
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
  check_shape("megamoe_traced", "x", x, {-1, plan.hidden});
  Tensor y = torch::stable::new_empty(x, {x.size(0), plan.hidden});
  MegaMoeArguments a{plan, read_workspace(workspace), x, topk_idx, topk_weights, w13, w2, y};
  check_arguments("megamoe_traced", a, MemoryKind::kCuda);
  std::vector<int64_t> const shape{plan.num_sms, kTraceTracks, records, kTraceWords};
  Tensor buffer = torch::stable::new_empty(x, shape, ScalarType::Long);
  Tensor trace = torch::stable::zero_(buffer);
  MegaMoeParams params = rank_params(a);
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
