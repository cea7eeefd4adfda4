// The three megamoe operators as torch calls them, over what a device does with the checked
// arguments of all ranks that a call plays.
#pragma once

#include "arguments.h"

namespace xstage {

using RunMegaMoe = void(std::vector<MegaMoeArguments> const& ranks);

template <RunMegaMoe* run>
struct MegaMoeOps {
  using Words = std::vector<int64_t>;

  static Tensor megamoe(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor w13, Tensor w2,
                        Words plan, Words workspace, std::optional<Tensor> num_tokens,
                        std::optional<double> clamp, double routed_scaling_factor,
                        std::optional<Tensor> expert_load) {
    Tensor y = new_result("megamoe", read_megamoe_plan(plan), x);
    megamoe_out(y, x, topk_idx, topk_weights, w13, w2, plan, workspace, num_tokens, clamp,
                routed_scaling_factor, expert_load);
    return y;
  }

  static void megamoe_out(Tensor out, Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor w13,
                          Tensor w2, Words plan, Words workspace, std::optional<Tensor> num_tokens,
                          std::optional<double> clamp, double routed_scaling_factor,
                          std::optional<Tensor> expert_load) {
    MegaMoeArguments a{read_megamoe_plan(plan),
                       read_workspace(workspace),
                       x,
                       topk_idx,
                       topk_weights,
                       w13,
                       w2,
                       out};
    set_options(a, {num_tokens, clamp, routed_scaling_factor, expert_load});
    check_arguments("megamoe", a);
    run({a});
  }

  static std::vector<Tensor> megamoe_virtual(std::vector<Tensor> x, std::vector<Tensor> topk_idx,
                                             std::vector<Tensor> topk_weights,
                                             std::vector<Tensor> w13, std::vector<Tensor> w2,
                                             Words plan, Words workspaces,
                                             std::optional<double> clamp,
                                             double routed_scaling_factor) {
    std::vector<MegaMoeArguments> const ranks =
        virtual_arguments({x, topk_idx, topk_weights, w13, w2}, plan, workspaces,
                          {std::nullopt, clamp, routed_scaling_factor, std::nullopt});
    run(ranks);
    std::vector<Tensor> results;
    for (MegaMoeArguments const& a : ranks) results.push_back(a.y);
    return results;
  }
};

}  // namespace xstage
