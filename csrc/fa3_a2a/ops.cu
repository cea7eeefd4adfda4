// CUDA forms of fa3, fa3_a2a and fa3_a2a_virtual.
#include "launch.h"

namespace xstage::cuda {
namespace {

std::tuple<Tensor, Tensor> fa3(Tensor q, Tensor k, Tensor v, std::optional<Tensor> key_segments,
                               std::optional<double> scale, bool causal, bool want_lse,
                               int64_t head_phase, std::vector<int64_t> plan) {
  return attention("fa3", fa3_generation(), q, k, v, {key_segments, scale, causal, want_lse},
                   head_phase, plan);
}

std::tuple<Tensor, Tensor> fa3_a2a(Tensor q, Tensor k, Tensor v, std::optional<Tensor> key_segments,
                                   std::optional<double> scale, bool causal, bool want_lse,
                                   std::vector<int64_t> plan, std::vector<int64_t> workspace) {
  std::vector<RankResult> const results =
      attention_a2a("fa3_a2a", fa3_generation(), {{q, k, v}},
                    {key_segments, scale, causal, want_lse}, plan, {read_workspace(workspace)});
  return {results[0].out, results[0].lse};
}

std::tuple<std::vector<Tensor>, std::vector<Tensor>> fa3_a2a_virtual(
    std::vector<Tensor> q, std::vector<Tensor> k, std::vector<Tensor> v,
    std::optional<Tensor> key_segments, std::optional<double> scale, bool causal, bool want_lse,
    std::vector<int64_t> plan, std::vector<int64_t> workspaces) {
  return attention_a2a_virtual("fa3_a2a_virtual", fa3_generation(), {q, k, v},
                               {key_segments, scale, causal, want_lse}, plan, workspaces);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(xstage, CUDA, m) {
  m.impl("fa3", TORCH_BOX(&fa3));
  m.impl("fa3_a2a", TORCH_BOX(&fa3_a2a));
  m.impl("fa3_a2a_virtual", TORCH_BOX(&fa3_a2a_virtual));
}

}  // namespace xstage::cuda
