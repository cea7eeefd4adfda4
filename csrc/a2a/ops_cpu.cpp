// CPU forms of ulysses_a2a and ulysses_a2a_virtual.
#include <cstring>

#include "call.h"
#include "common/channel_cpu.h"

namespace xstage::cpu {
namespace {

// Rows of the block that goes from `rank` to dst_rank, into the receiver's tensor.
void send_block(Tensor const& input, A2aForm const& form, A2aShape const& shape, int rank,
                int dst_rank, char* destination) {
  A2aBlock const block = block_between(form, rank, dst_rank);
  OperandStrides const stride = operand_strides(input);
  int64_t const element = element_bytes(shape.dtype);
  auto const* const source = static_cast<char const*>(input.const_data_ptr());
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t row = 0; row < block.num_rows; ++row) {
      for (int64_t head = 0; head < block.num_heads; ++head) {
        int64_t const from = b * stride.batch + (block.src_row + row) * stride.row +
                             (block.src_head + head) * stride.head;
        int64_t const to =
            bshd_offset(b, block.dst_row + row, block.dst_head + head, form.received_rows(dst_rank),
                        form.received_heads(dst_rank), shape.head_dim);
        std::memcpy(destination + to * element, source + from * element,
                    static_cast<size_t>(shape.row_bytes()));
      }
    }
  }
}

// Destinations start behind the own rank, so that ranks do not all store to rank 0 first.
void send_rank(RingCall const& call, RankCall const& rank, std::vector<Tensor> const& inputs,
               std::vector<A2aForm> const& forms, A2aShape const& shape) {
  for (int i = 1; i <= call.layout.world; ++i) {
    int const dst_rank = (rank.rank() + i) % call.layout.world;
    for (size_t t = 0; t < inputs.size(); ++t) {
      int64_t const offset = tensor_offset(forms, t, dst_rank, shape.batch, shape.row_bytes());
      send_block(inputs[t], forms[t], shape, rank.rank(), dst_rank,
                 call.slot(rank, dst_rank) + offset);
    }
  }
}

// Inputs rank after rank. Every step runs for all ranks of this process before the next one.
std::vector<Tensor> exchange(char const* op, std::vector<Tensor> const& inputs,
                             std::vector<int64_t> const& plan_words,
                             std::vector<Workspace> const& workspaces) {
  RingCall call = open_call(op, plan_words, workspaces, MemoryKind::kCpu);
  size_t const ranks = call.ranks.size();
  XS_CHECK(!inputs.empty() && inputs.size() % ranks == 0, "xstage.", op,
           ": inputs: expected the same number of tensors for each of ", ranks, " ranks, got ",
           inputs.size());
  size_t const per_rank = inputs.size() / ranks;
  std::vector<A2aForm> const forms = make_forms(call.plan, static_cast<int64_t>(per_rank));
  std::vector<std::vector<Tensor>> of_rank(ranks);
  A2aShape shape{};
  for (size_t i = 0; i < ranks; ++i) {
    for (size_t t = 0; t < per_rank; ++t) {
      check_cpu_dtype(op, "inputs", inputs[i * per_rank + t]);
      of_rank[i].push_back(unit_last_stride(inputs[i * per_rank + t]));
    }
    A2aShape const own = check_inputs(op, of_rank[i], forms, call.ranks[i].rank());
    XS_CHECK(i == 0 || (own.batch == shape.batch && own.head_dim == shape.head_dim &&
                        own.dtype == shape.dtype),
             "xstage.", op, ": inputs: expected the same batch, head size and dtype on all ranks");
    shape = own;
  }
  take_slots(op, call, a2a_slot_bytes(forms, shape.batch, shape.row_bytes()), false);
  mix_call(call, plan_words, agreed_facts(shape, per_rank));

  for (RankCall const& rank : call.ranks) {
    announce_slots(rank.workspace, rank.taken.slot, call.free_slots());
  }
  for (size_t i = 0; i < ranks; ++i) {
    if (wait_for_slot(call.ranks[i].workspace, call.ranks[i].taken.slot)) {
      send_rank(call, call.ranks[i], of_rank[i], forms, shape);
    }
  }
  for (RankCall const& rank : call.ranks) publish(rank.workspace, call_epoch(rank.workspace));
  std::vector<Tensor> outputs;
  for (size_t i = 0; i < ranks; ++i) {
    RankCall const& rank = call.ranks[i];
    bool const ok =
        wait_for_ranks(rank.workspace, call_epoch(rank.workspace) - 1, Phase::kA2aArrival);
    for (Tensor& output : received_tensors(call, rank, forms, shape, inputs.front().device())) {
      if (!ok) {
        std::memset(output.mutable_data_ptr(), 0xff,
                    static_cast<size_t>(output.numel() * element_bytes(shape.dtype)));
      }
      outputs.push_back(output);
    }
  }
  return outputs;
}

std::vector<Tensor> ulysses_a2a(std::vector<Tensor> inputs, std::vector<int64_t> plan,
                                std::vector<int64_t> workspace) {
  return exchange("ulysses_a2a", inputs, plan, {read_workspace(workspace)});
}

std::vector<Tensor> ulysses_a2a_virtual(std::vector<Tensor> inputs, std::vector<int64_t> plan,
                                        std::vector<int64_t> workspaces) {
  return exchange("ulysses_a2a_virtual", inputs, plan, read_virtual_workspaces(workspaces));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(xstage, CPU, m) {
  m.impl("ulysses_a2a", TORCH_BOX(&ulysses_a2a));
  m.impl("ulysses_a2a_virtual", TORCH_BOX(&ulysses_a2a_virtual));
}

}  // namespace xstage::cpu
