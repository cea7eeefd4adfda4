// CPU operators of both attention generations. The generations differ in their kernels only, so on
// the CPU they are one implementation under two names.
#pragma once

#include "attend_cpu.h"
#include "common/channel_cpu.h"
#include "ops.h"

namespace xstage::cpu {

inline int32_t const* segment_data(AttentionOptions const& options) {
  return options.key_segments.has_value()
             ? static_cast<int32_t const*>(options.key_segments->const_data_ptr())
             : nullptr;
}

// float32 [B, heads, Sq], or empty.
inline Tensor new_lse(AttentionProblem const& problem, Tensor const& like) {
  std::vector<int64_t> size = {0};
  if (problem.want_lse) size = {problem.batch, problem.num_heads, problem.num_query_rows};
  return torch::stable::new_empty(like, {size.data(), size.size()}, ScalarType::Float);
}

inline float* lse_data(AttentionProblem const& problem, Tensor const& lse) {
  return problem.want_lse ? static_cast<float*>(lse.mutable_data_ptr()) : nullptr;
}

inline int32_t block_rows(AttentionPlan const& plan) {
  return static_cast<int32_t>(plan.block_m != 0 ? plan.block_m : kDefaultBlockM);
}

// What AttentionOps calls; a generation adds its names.
struct CpuKernels {
  static std::tuple<Tensor, Tensor> attention(char const* op, Tensor const& q, Tensor const& k,
                                              Tensor const& v, AttentionOptions const& options,
                                              int64_t head_phase,
                                              std::vector<int64_t> const& plan_words);

  static std::vector<RankResult> attention_a2a(char const* op,
                                               std::vector<RankOperands> const& operands,
                                               AttentionOptions const& options,
                                               std::vector<int64_t> const& plan_words,
                                               std::vector<Workspace> const& workspaces);
};

}  // namespace xstage::cpu
