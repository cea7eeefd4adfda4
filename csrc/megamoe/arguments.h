// The arguments of a megamoe call, checked on the host; the CPU and the CUDA operator share this.
#pragma once

#include <limits>
#include <optional>

#include "common/torch_glue.h"
#include "layout.h"

namespace xstage {

// One rank's part of a call. Once checked, all tensors are contiguous and on one device.
struct MegaMoeArguments {
  MegaMoePlan plan;
  Workspace workspace;
  Tensor x;             // bf16 [tokens, hidden]
  Tensor topk_idx;      // int32 or int64 [tokens, topk]
  Tensor topk_weights;  // float32 [tokens, topk]
  Tensor w13;           // bf16 [local experts, 2 * intermediate, hidden]
  Tensor w2;            // bf16 [local experts, hidden, intermediate]
  Tensor y;             // bf16 [tokens, hidden]
  std::optional<Tensor> num_tokens =
      std::nullopt;  // int32 or int64, one element: rows of x that are tokens
  std::optional<Tensor> expert_load =
      std::nullopt;  // int64 [local experts], received rows are added
  float clamp = std::numeric_limits<float>::infinity();
  float routed_scaling_factor = 1.0f;

  int64_t tokens() const { return x.size(0); }
};

// What a call does beside its tensors.
struct MegaMoeOptions {
  std::optional<Tensor> num_tokens;
  std::optional<double> clamp;
  double routed_scaling_factor = 1.0;
  std::optional<Tensor> expert_load;
};

inline void check_integers(char const* op, char const* name, Tensor const& tensor) {
  ScalarType const type = tensor.scalar_type();
  XS_CHECK(type == ScalarType::Int || type == ScalarType::Long, "xstage.", op, ": ", name,
           ": expected int32 or int64, got ", dtype_name(type));
}

inline void check_same_device(char const* op, char const* name, Tensor const& tensor,
                              Tensor const& x) {
  XS_CHECK(tensor.is_cpu() == x.is_cpu() && tensor.get_device() == x.get_device(), "xstage.", op,
           ": ", name, ": expected the device of x, got ", tensor.is_cpu() ? "cpu" : "cuda ",
           tensor.is_cpu() ? std::string() : std::to_string(tensor.get_device()));
}

// Kernels move these tensors 16 bytes at a time, or by TMA.
inline void check_address(char const* op, char const* name, Tensor const& tensor) {
  auto const address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  XS_CHECK(tensor.is_cpu() || address % 16 == 0 || tensor.numel() == 0, "xstage.", op, ": ", name,
           ": expected an address that is a multiple of 16; clone it");
}

inline void check_weights(char const* op, MegaMoeArguments const& a) {
  MegaMoePlan const& plan = a.plan;
  int64_t const experts = plan.experts_per_rank();
  check_shape(op, "w13", a.w13, {experts, int64_t{2} * plan.intermediate, plan.hidden});
  check_shape(op, "w2", a.w2, {experts, plan.hidden, plan.intermediate});
  for (auto const& [name, tensor] : {std::pair{"w13", &a.w13}, std::pair{"w2", &a.w2}}) {
    check_dtype(op, name, *tensor, ScalarType::BFloat16);
    check_contiguous(op, name, *tensor);
    check_same_device(op, name, *tensor, a.x);
    check_address(op, name, *tensor);
  }
}

inline void check_tokens(char const* op, MegaMoeArguments const& a) {
  MegaMoePlan const& plan = a.plan;
  check_shape(op, "x", a.x, {-1, plan.hidden});
  check_dtype(op, "x", a.x, ScalarType::BFloat16);
  int64_t const tokens = a.tokens();
  XS_CHECK(tokens <= plan.max_tokens, "xstage.", op, ": x: expected at most ", plan.max_tokens,
           " tokens (max_tokens of the plan), got ", tokens);
  check_shape(op, "topk_idx", a.topk_idx, {tokens, plan.topk});
  check_integers(op, "topk_idx", a.topk_idx);
  check_same_device(op, "topk_idx", a.topk_idx, a.x);
  check_shape(op, "topk_weights", a.topk_weights, {tokens, plan.topk});
  check_dtype(op, "topk_weights", a.topk_weights, ScalarType::Float);
  check_same_device(op, "topk_weights", a.topk_weights, a.x);
}

inline void check_options(char const* op, MegaMoeArguments const& a) {
  XS_CHECK(a.clamp > 0, "xstage.", op, ": clamp: expected a positive number, got ", a.clamp);
  if (a.num_tokens) {
    XS_CHECK(a.num_tokens->numel() == 1, "xstage.", op, ": num_tokens: expected one element, got ",
             shape_text(*a.num_tokens));
    check_integers(op, "num_tokens", *a.num_tokens);
    check_same_device(op, "num_tokens", *a.num_tokens, a.x);
  }
  if (a.expert_load) {
    check_shape(op, "expert_load", *a.expert_load, {a.plan.experts_per_rank()});
    check_dtype(op, "expert_load", *a.expert_load, ScalarType::Long);
    check_contiguous(op, "expert_load", *a.expert_load);
    check_same_device(op, "expert_load", *a.expert_load, a.x);
  }
}

// Checks everything that the host can see, by name, before anything is stored anywhere. Tokens,
// ids and routing weights may have any strides (they are copied when they must be); the experts'
// weights are too large to copy in silence and must be contiguous.
inline void check_arguments(char const* op, MegaMoeArguments& a) {
  check_memory(op, a.workspace, a.x.is_cpu() ? MemoryKind::kCpu : MemoryKind::kCuda);
  XS_CHECK(a.plan.world == a.workspace.world, "xstage.", op, ": plan: expected world ",
           a.workspace.world, " like the workspace, got ", a.plan.world);
  check_region(op, a.workspace, MegaMoeLayout(a.plan).total);
  check_tokens(op, a);
  check_weights(op, a);
  check_options(op, a);
  check_shape(op, "out", a.y, {a.tokens(), a.plan.hidden});
  check_dtype(op, "out", a.y, ScalarType::BFloat16);
  check_contiguous(op, "out", a.y);
  check_same_device(op, "out", a.y, a.x);
  check_address(op, "out", a.y);
  for (Tensor* tensor : {&a.x, &a.topk_idx, &a.topk_weights}) {
    *tensor = torch::stable::contiguous(*tensor);
  }
  check_address(op, "x", a.x);
}

// Where a rank's result goes.
inline Tensor new_result(char const* op, MegaMoePlan const& plan, Tensor const& x) {
  check_shape(op, "x", x, {-1, plan.hidden});
  return torch::stable::new_empty(x, {x.size(0), plan.hidden});
}

inline void set_options(MegaMoeArguments& a, MegaMoeOptions const& options) {
  a.num_tokens = options.num_tokens;
  a.expert_load = options.expert_load;
  if (options.clamp) a.clamp = static_cast<float>(*options.clamp);
  a.routed_scaling_factor = static_cast<float>(options.routed_scaling_factor);
}

// The lists of megamoe_virtual, one entry per rank.
struct MegaMoeLists {
  std::vector<Tensor> x, topk_idx, topk_weights, w13, w2;
};

inline std::vector<MegaMoeArguments> virtual_arguments(MegaMoeLists const& lists,
                                                       std::vector<int64_t> const& plan_words,
                                                       std::vector<int64_t> const& workspaces,
                                                       MegaMoeOptions const& options) {
  char const* const op = "megamoe_virtual";
  MegaMoePlan const plan = read_megamoe_plan(plan_words);
  std::vector<Workspace> const ranks = read_virtual_workspaces(workspaces);
  for (auto const& [name, list] : {std::pair{"x", &lists.x}, std::pair{"topk_idx", &lists.topk_idx},
                                   std::pair{"topk_weights", &lists.topk_weights},
                                   std::pair{"w13", &lists.w13}, std::pair{"w2", &lists.w2}}) {
    XS_CHECK(list->size() == ranks.size(), "xstage.", op, ": ", name, ": expected ", ranks.size(),
             " tensors, one per rank, got ", list->size());
  }
  std::vector<MegaMoeArguments> all;
  for (size_t r = 0; r < ranks.size(); ++r) {
    Tensor const& x = lists.x[r];
    check_same_device(op, "x", x, lists.x[0]);  // one launch plays them all
    MegaMoeArguments a{plan,
                       ranks[r],
                       x,
                       lists.topk_idx[r],
                       lists.topk_weights[r],
                       lists.w13[r],
                       lists.w2[r],
                       new_result(op, plan, x)};
    set_options(a, options);
    check_arguments(op, a);
    all.push_back(std::move(a));
  }
  return all;
}

}  // namespace xstage
