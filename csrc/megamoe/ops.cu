// The megamoe operators on CUDA: parameters and launch.
#include <tuple>

#include "launch.h"
#include "ops.h"
#include "trace_format.h"

namespace xstage {
namespace {

MegaMoeParams rank_params(MegaMoeArguments const& a) {
  MegaMoeParams params{{}, {}, {}, {}, a.plan, MegaMoeLayout(a.plan), a.workspace};
  params.x = static_cast<__nv_bfloat16 const*>(a.x.const_data_ptr());
  params.topk_idx = a.topk_idx.const_data_ptr();
  params.idx_is_64 = a.topk_idx.scalar_type() == ScalarType::Long;
  params.topk_weights = static_cast<float const*>(a.topk_weights.const_data_ptr());
  params.y = static_cast<__nv_bfloat16*>(a.y.mutable_data_ptr());
  params.rows = static_cast<int32_t>(a.tokens());
  if (a.num_tokens) {
    params.num_tokens = a.num_tokens->const_data_ptr();
    params.num_tokens_is_64 = a.num_tokens->scalar_type() == ScalarType::Long;
  }
  if (a.expert_load) {
    params.expert_load = static_cast<int64_t*>(a.expert_load->mutable_data_ptr());
  }
  params.clamp = a.clamp;
  params.routed_scale = a.routed_scaling_factor;
  encode_megamoe_maps(params, a.w13.const_data_ptr(), a.w2.const_data_ptr());
  return params;
}

void run(std::vector<MegaMoeArguments> const& ranks) {
  Tensor const& x = ranks[0].x;
  check_megamoe_instance(ranks[0].plan);
  DeviceGuard const guard(x.get_device_index());
  std::vector<MegaMoeParams> params;
  for (MegaMoeArguments const& a : ranks) params.push_back(rank_params(a));
  launch_megamoe(params, current_stream(x));
}

std::tuple<Tensor, Tensor> megamoe_traced(Tensor x, Tensor topk_idx, Tensor topk_weights,
                                          Tensor w13, Tensor w2, std::vector<int64_t> plan_words,
                                          std::vector<int64_t> workspace, int64_t records) {
  char const* const op = "megamoe_traced";
  XS_CHECK(records >= 1 && records <= (1 << 20), "xstage.", op, ": records: expected 1 to ",
           1 << 20, ", got ", records);
  MegaMoePlan const plan = read_megamoe_plan(plan_words);
  MegaMoeArguments a{plan, read_workspace(workspace), x, topk_idx, topk_weights, w13,
                     w2,   new_result(op, plan, x)};
  check_arguments(op, a);
  check_megamoe_instance(plan);
  DeviceGuard const guard(x.get_device_index());
  std::vector<int64_t> const shape{plan.num_sms, kTraceTracks, records, kTraceWords};
  Tensor buffer = torch::stable::new_empty(x, shape, ScalarType::Long);
  Tensor trace = torch::stable::zero_(buffer);
  MegaMoeParams params = rank_params(a);
  params.trace = static_cast<int64_t*>(trace.mutable_data_ptr());
  params.trace_records = static_cast<int32_t>(records);
  launch_megamoe({params}, current_stream(x));
  return {a.y, trace};
}

using Ops = MegaMoeOps<run>;

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(xstage, CUDA, m) {
  m.impl("megamoe", TORCH_BOX(&Ops::megamoe));
  m.impl("megamoe_out", TORCH_BOX(&Ops::megamoe_out));
  m.impl("megamoe_virtual", TORCH_BOX(&Ops::megamoe_virtual));
  m.impl("megamoe_traced", TORCH_BOX(&megamoe_traced));
}

STABLE_TORCH_LIBRARY_IMPL(xstage, CompositeExplicitAutograd, m) {
  m.impl("megamoe_instances", TORCH_BOX(&megamoe_instances));
}

}  // namespace xstage
