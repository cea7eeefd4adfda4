// What one rank computes in one call: shapes, strides and semantics, checked. Host only.
#pragma once

#include <cmath>
#include <cstring>
#include <optional>
#include <tuple>

#include "common/torch_glue.h"
#include "layout.h"

namespace xstage {

// Strides in elements; the last dimension has stride 1.
struct OperandStrides {
  int64_t batch;
  int64_t row;
  int64_t head;
};

struct AttentionProblem {
  int64_t batch;
  int64_t num_query_rows;
  int64_t num_keys;
  int64_t num_heads;     // query heads of this rank
  int64_t num_kv_heads;  // key heads of this rank
  int64_t head_dim;
  int64_t kv_group;
  int64_t head_phase;
  int64_t num_segments;
  OperandStrides q;
  OperandStrides k;
  OperandStrides v;
  float scale;
  bool causal;
  bool want_lse;
  ScalarType dtype;
};

// What the user means, next to the tensors.
struct AttentionOptions {
  std::optional<Tensor> key_segments;
  std::optional<double> scale;
  bool causal;
  bool want_lse;
};

inline OperandStrides operand_strides(Tensor const& tensor) {
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

inline int64_t element_bytes(ScalarType type) {
  return type == ScalarType::Float ? 4 : 2;
}

// The tensor itself, or a contiguous copy where the last stride is not 1.
inline Tensor unit_last_stride(Tensor const& tensor) {
  bool const unit = tensor.size(tensor.dim() - 1) == 1 || tensor.stride(tensor.dim() - 1) == 1;
  return unit ? tensor : torch::stable::contiguous(tensor);
}

inline void check_same_device(char const* op, char const* name, Tensor const& tensor,
                              Tensor const& like) {
  XS_CHECK(tensor.device() == like.device(), "xstage.", op, ": ", name,
           ": expected a tensor on the device of the first one");
}

inline void check_segments(char const* op, std::optional<Tensor> const& segments, Tensor const& q) {
  if (!segments.has_value()) return;
  int64_t const batch = q.size(0);
  check_same_device(op, "key_segments", *segments, q);
  check_shape(op, "key_segments", *segments, {batch, -1, 2});
  check_dtype(op, "key_segments", *segments, ScalarType::Int);
  check_contiguous(op, "key_segments", *segments);
  XS_CHECK(segments->size(1) <= kMaxSegments, "xstage.", op, ": key_segments: expected at most ",
           kMaxSegments, " runs per batch entry, got ", segments->size(1));
}

// q [B, Sq, Hq, D], k and v [B, Sk, Hkv, D].
inline AttentionProblem make_problem(char const* op, Tensor const& q, Tensor const& k,
                                     Tensor const& v, AttentionOptions const& options,
                                     int64_t kv_group, int64_t head_phase) {
  check_shape(op, "q", q, {-1, -1, -1, -1});
  check_shape(op, "k", k, {q.size(0), -1, -1, q.size(3)});
  check_shape(op, "v", v, {q.size(0), k.size(1), k.size(2), q.size(3)});
  check_dtype(op, "k", k, q.scalar_type());
  check_dtype(op, "v", v, q.scalar_type());
  check_same_device(op, "k", k, q);
  check_same_device(op, "v", v, q);
  check_segments(op, options.key_segments, q);
  AttentionProblem problem{};
  problem.batch = q.size(0);
  problem.num_query_rows = q.size(1);
  problem.num_keys = k.size(1);
  problem.num_heads = q.size(2);
  problem.num_kv_heads = k.size(2);
  problem.head_dim = q.size(3);
  problem.kv_group = kv_group;
  problem.head_phase = head_phase;
  problem.num_segments = options.key_segments.has_value() ? options.key_segments->size(1) : 0;
  problem.q = operand_strides(q);
  problem.k = operand_strides(k);
  problem.v = operand_strides(v);
  problem.scale = options.scale.has_value()
                      ? static_cast<float>(*options.scale)
                      : 1.0f / std::sqrt(static_cast<float>(problem.head_dim));
  problem.causal = options.causal;
  problem.want_lse = options.want_lse;
  problem.dtype = q.scalar_type();
  XS_CHECK(head_phase >= 0 && head_phase < kv_group, "xstage.", op, ": head_phase: expected 0 to ",
           kv_group - 1, ", got ", head_phase);
  int64_t const needed =
      problem.num_heads == 0 ? 0 : (problem.num_heads - 1 + head_phase) / kv_group + 1;
  XS_CHECK(problem.num_kv_heads == needed, "xstage.", op, ": k: expected ", needed,
           " key heads for ", problem.num_heads, " query heads (", kv_group,
           " query heads per key head, the first is number ", head_phase, " of its group), got ",
           problem.num_kv_heads);
  XS_CHECK(problem.num_query_rows <= kMaxRows && problem.num_keys <= kMaxRows, "xstage.", op,
           ": expected at most ", kMaxRows, " rows, got ", problem.num_query_rows, " and ",
           problem.num_keys);
  return problem;
}

// The plan of a stand-alone call without one: whole tensors, one rank.
inline AttentionPlan single_rank_plan(char const* op, Tensor const& q, Tensor const& k) {
  check_shape(op, "q", q, {-1, -1, -1, -1});
  check_shape(op, "k", k, {-1, -1, -1, -1});
  int64_t const heads = q.size(2);
  int64_t const kv_heads = k.size(2);
  XS_CHECK(heads == 0 || (kv_heads > 0 && heads % kv_heads == 0), "xstage.", op,
           ": k: expected a number of key heads that divides ", heads, " query heads, got ",
           kv_heads, "; pass a plan for other groupings");
  AttentionPlan plan{};
  plan.world = 1;
  plan.slots = 1;
  plan.kv_group = heads == 0 ? 1 : heads / kv_heads;
  plan.rows[0] = q.size(1);
  plan.kv_rows[0] = k.size(1);
  plan.heads[0] = heads;
  return plan;
}

// Tensors that must have the plan's shape on this rank, in head form (behind the first All-to-All).
inline void check_against_plan(char const* op, AttentionProblem const& problem,
                               AttentionLayout const& layout, int64_t rank) {
  int const r = static_cast<int>(rank);
  XS_CHECK(
      problem.num_query_rows == layout.rows.total() && problem.num_heads == layout.heads.count(r),
      "xstage.", op, ": q: expected ", layout.rows.total(), " rows and ", layout.heads.count(r),
      " heads on rank ", rank, " by the plan, got ", problem.num_query_rows, " and ",
      problem.num_heads);
  XS_CHECK(problem.num_keys == layout.kv_rows.total(), "xstage.", op, ": k: expected ",
           layout.kv_rows.total(), " rows by the plan, got ", problem.num_keys);
}

// What ranks must agree on beside the plan.
inline std::vector<int64_t> agreed_facts(AttentionProblem const& problem) {
  int32_t scale_bits;
  std::memcpy(&scale_bits, &problem.scale, sizeof(scale_bits));
  return {problem.batch, problem.head_dim, static_cast<int64_t>(problem.dtype), scale_bits,
          problem.causal};
}

}  // namespace xstage
