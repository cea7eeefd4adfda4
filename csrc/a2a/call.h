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
  XS_CHECK(plan.row_pad % 16 == 0, "xstage.ulysses_a2a: plan: row_pad: expected a multiple of 16, ",
           "got ", plan.row_pad);
  std::vector<A2aForm> forms;
  for (int64_t t = 0; t < num_tensors; ++t) {
    forms.push_back(make_form(layout, direction, plan.row_pad, t < plan.num_query));
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
    check_same_device(op, name.c_str(), inputs[t], inputs.front());
  }
  return shape;
}

// What ranks must agree on beside the plan.
inline std::vector<int64_t> agreed_facts(A2aShape const& shape, size_t num_tensors) {
  return {static_cast<int64_t>(num_tensors), shape.batch, shape.head_dim,
          static_cast<int64_t>(shape.dtype)};
}

// A call with its slots taken: everything but the copying.
struct Exchange {
  RingCall call;
  std::vector<A2aForm> forms;
  std::vector<std::vector<Tensor>> inputs;  // [rank][tensor], last stride 1
  A2aShape shape;

  int64_t slot_bytes() const { return a2a_slot_bytes(forms, shape.batch, shape.row_bytes()); }
  // Of tensor t in the region of rank r.
  int64_t offset(size_t t, int r) const {
    return call.ring.offset(call.slot_index()) +
           tensor_offset(forms, t, r, shape.batch, shape.row_bytes());
  }
};

// Inputs rank after rank.
inline Exchange open_exchange(char const* op, std::vector<Tensor> const& inputs,
                              std::vector<int64_t> const& plan_words,
                              std::vector<Workspace> const& workspaces, bool capturing) {
  XS_CHECK(!inputs.empty() && inputs.size() % workspaces.size() == 0, "xstage.", op,
           ": inputs: expected the same number of tensors for each of ", workspaces.size(),
           " ranks, got ", inputs.size());
  size_t const per_rank = inputs.size() / workspaces.size();
  bool const cuda = inputs.front().device().type() == torch::headeronly::DeviceType::CUDA;
  Exchange exchange{
      open_call(op, plan_words, workspaces, cuda ? MemoryKind::kCuda : MemoryKind::kCpu),
      {},
      {},
      {}};
  exchange.forms = make_forms(exchange.call.plan, static_cast<int64_t>(per_rank));
  for (size_t i = 0; i < workspaces.size(); ++i) {
    exchange.inputs.emplace_back();
    for (size_t t = 0; t < per_rank; ++t) {
      Tensor const& input = inputs[i * per_rank + t];
      check_float_dtype(op, "inputs", input);
      exchange.inputs[i].push_back(unit_last_stride(input));
    }
    A2aShape const own =
        check_inputs(op, exchange.inputs[i], exchange.forms, exchange.call.ranks[i].rank());
    A2aShape const& first = exchange.shape;
    XS_CHECK(i == 0 || (own.batch == first.batch && own.head_dim == first.head_dim &&
                        own.dtype == first.dtype),
             "xstage.", op, ": inputs: expected the same batch, head size and dtype on all ranks");
    exchange.shape = own;
  }
  take_slots(op, exchange.call, exchange.slot_bytes(), capturing);
  mix_call(exchange.call, plan_words, agreed_facts(exchange.shape, per_rank));
  return exchange;
}

// What a rank received, as tensors on its slot.
inline std::vector<Tensor> received_tensors(Exchange const& exchange, RankCall const& rank) {
  std::vector<Tensor> outputs;
  int const r = rank.rank();
  for (size_t t = 0; t < exchange.forms.size(); ++t) {
    A2aForm const& form = exchange.forms[t];
    A2aShape const& shape = exchange.shape;
    int64_t const rows = form.received_rows(r);
    int64_t const pitch = received_pitch(form, r, shape.row_bytes()) / element_bytes(shape.dtype);
    outputs.push_back(slot_tensor(rank.workspace, rank.taken, exchange.offset(t, r),
                                  {shape.batch, rows, form.received_heads(r), shape.head_dim},
                                  {rows * pitch, pitch, shape.head_dim, 1}, shape.dtype,
                                  exchange.inputs.front().front().device()));
  }
  return outputs;
}

// The operators as torch calls them, over what a device does with one exchange.
using RunExchange = std::vector<Tensor>(char const* op, std::vector<Tensor> const& inputs,
                                        std::vector<int64_t> const& plan,
                                        std::vector<Workspace> const& workspaces);

template <RunExchange* run>
std::vector<Tensor> ulysses_a2a(std::vector<Tensor> inputs, std::vector<int64_t> plan,
                                std::vector<int64_t> workspace) {
  return run("ulysses_a2a", inputs, plan, {read_workspace(workspace)});
}

template <RunExchange* run>
std::vector<Tensor> ulysses_a2a_virtual(std::vector<Tensor> inputs, std::vector<int64_t> plan,
                                        std::vector<int64_t> workspaces) {
  return run("ulysses_a2a_virtual", inputs, plan, read_virtual_workspaces(workspaces));
}

}  // namespace xstage
