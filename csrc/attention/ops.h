// The three operators of an attention generation as torch calls them: alone, with the output
// All-to-All, and the latter for all virtual ranks of one process. Generation and device differ in
// their names and kernels only, so these forms are written once.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "call.h"

namespace xstage {

// Operands of one rank, in head form.
struct RankOperands {
  Tensor q;
  Tensor k;
  Tensor v;
};

struct RankResult {
  Tensor out;
  Tensor lse;
};

// Kernels: a type with the operators' names (kAlone, kA2a, kVirtual) and two static functions,
//   attention(op, q, k, v, options, head_phase, plan) -> (out, lse)
//   attention_a2a(op, operands, options, plan, workspaces) -> one RankResult per rank played
template <class Kernels>
struct AttentionOps {
  using Words = std::vector<int64_t>;

  static std::tuple<Tensor, Tensor> alone(Tensor q, Tensor k, Tensor v,
                                          std::optional<Tensor> key_segments,
                                          std::optional<double> scale, bool causal, bool want_lse,
                                          int64_t head_phase, Words plan) {
    AttentionOptions const options{key_segments, scale, causal, want_lse};
    return Kernels::attention(Kernels::kAlone, q, k, v, options, head_phase, plan);
  }

  static std::tuple<Tensor, Tensor> with_a2a(Tensor q, Tensor k, Tensor v,
                                             std::optional<Tensor> key_segments,
                                             std::optional<double> scale, bool causal,
                                             bool want_lse, Words plan, Words workspace) {
    AttentionOptions const options{key_segments, scale, causal, want_lse};
    std::vector<RankOperands> const operands = {{q, k, v}};
    std::vector<Workspace> const ranks = {read_workspace(workspace)};
    std::vector<RankResult> const results =
        Kernels::attention_a2a(Kernels::kA2a, operands, options, plan, ranks);
    return {results[0].out, results[0].lse};
  }

  // q, k, v: of all virtual ranks, rank after rank.
  static std::tuple<std::vector<Tensor>, std::vector<Tensor>> with_a2a_virtual(
      std::vector<Tensor> q, std::vector<Tensor> k, std::vector<Tensor> v,
      std::optional<Tensor> key_segments, std::optional<double> scale, bool causal, bool want_lse,
      Words plan, Words workspaces) {
    char const* op = Kernels::kVirtual;
    std::vector<Workspace> const ranks = read_virtual_workspaces(workspaces);
    size_t const world = ranks.size();
    XS_CHECK(q.size() == world && k.size() == world && v.size() == world, "xstage.", op,
             ": q, k, v: expected ", world, " tensors each, one per rank, got ", q.size(), ", ",
             k.size(), " and ", v.size());
    std::vector<RankOperands> operands;
    for (size_t r = 0; r < world; ++r) operands.push_back({q[r], k[r], v[r]});
    std::vector<Tensor> outs;
    std::vector<Tensor> lses;
    AttentionOptions const options{key_segments, scale, causal, want_lse};
    for (RankResult const& result : Kernels::attention_a2a(op, operands, options, plan, ranks)) {
      outs.push_back(result.out);
      lses.push_back(result.lse);
    }
    return {outs, lses};
  }
};

}  // namespace xstage
