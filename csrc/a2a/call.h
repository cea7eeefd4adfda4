// One call of the All-to-All: forms of its tensors, checks, slot layout. Host only.
#pragma once

#include "attention/call.h"
#include "layout.h"

namespace xstage {

inline std::vector<A2aForm> make_forms(AttentionPlan const& plan, int64_t num_tensors) {
  AttentionLayout const layout = make_layout(plan);
  auto const direction = static_cast<A2aDirection>(plan.direction);
  XS_CHECK(num_tensors >= 1 && num_tensors <= kMaxA2aTensors,
           "xstage.ulysses_a2a: inputs: expected 1 to ", kMaxA2aTensors, " tensors, got ",
           num_tensors);
  XS_CHECK(direction == A2aDirection::kToHeads || num_tensors <= plan.num_query,
           "xstage.ulysses_a2a: inputs: key heads that ranks share cannot be sent back; expected "
           "num_query of at least ",
           num_tensors, ", got ", plan.num_query);
  std::vector<A2aForm> forms;
  for (int64_t t = 0; t < num_tensors; ++t) {
    forms.push_back(make_form(layout, direction, t < plan.num_query));
  }
  return forms;
}

// Start of tensor t within rank r's slot.
inline int64_t tensor_offset(std::vector<A2aForm> const& forms, size_t t, int r, int64_t batch,
                             int64_t row_bytes) {
  int64_t offset = 0;
  for (size_t i = 0; i < t; ++i) offset += received_bytes(forms[i], r, batch, row_bytes);
  return offset;
}

inline int64_t a2a_slot_bytes(std::vector<A2aForm> const& forms, int64_t batch, int64_t row_bytes) {
  int64_t most = 0;
  for (int r = 0; r < forms.front().world; ++r) {
    most = max_of(most, tensor_offset(forms, forms.size(), r, batch, row_bytes));
  }
  return most;
}

// Batch, head size and element of a call; the same for all its tensors and ranks.
struct A2aShape {
  int64_t batch;
  int64_t head_dim;
  ScalarType dtype;

  int64_t row_bytes() const { return head_dim * element_bytes(dtype); }
};

inline A2aShape check_inputs(char const* op, std::vector<Tensor> const& inputs,
                             std::vector<A2aForm> const& forms, int rank) {
  XS_CHECK(inputs.front().dim() == 4, "xstage.", op, ": inputs[0]: expected [B, rows, heads, D], ",
           "got ", shape_text(inputs.front()));
  A2aShape const shape{inputs.front().size(0), inputs.front().size(3),
                       inputs.front().scalar_type()};
  for (size_t t = 0; t < inputs.size(); ++t) {
    std::string const name = concat("inputs[", t, "] of rank ", rank);
    check_shape(op, name.c_str(), inputs[t],
                {shape.batch, forms[t].sent_rows(rank), forms[t].sent_heads(rank), shape.head_dim});
    check_dtype(op, name.c_str(), inputs[t], shape.dtype);
  }
  return shape;
}

// What ranks must agree on beside the plan.
inline std::vector<int64_t> agreed_facts(A2aShape const& shape, size_t num_tensors) {
  return {static_cast<int64_t>(num_tensors), shape.batch, shape.head_dim,
          static_cast<int64_t>(shape.dtype)};
}

// What rank r received, as tensors on its slot.
inline std::vector<Tensor> received_tensors(RingCall const& call, RankCall const& rank,
                                            std::vector<A2aForm> const& forms,
                                            A2aShape const& shape, torch::stable::Device device) {
  std::vector<Tensor> outputs;
  for (size_t t = 0; t < forms.size(); ++t) {
    int64_t const offset = tensor_offset(forms, t, rank.rank(), shape.batch, shape.row_bytes());
    outputs.push_back(slot_tensor(rank.workspace, rank.taken,
                                  call.ring.offset(rank.taken.slot) + offset,
                                  {shape.batch, forms[t].received_rows(rank.rank()),
                                   forms[t].received_heads(rank.rank()), shape.head_dim},
                                  shape.dtype, device));
  }
  return outputs;
}

}  // namespace xstage
