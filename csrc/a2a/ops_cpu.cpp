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
        int64_t const to_row = b * form.received_rows(dst_rank) + block.dst_row + row;
        int64_t const to = to_row * received_pitch(form, dst_rank, shape.row_bytes()) +
                           (block.dst_head + head) * shape.row_bytes();
        std::memcpy(destination + to, source + from * element,
                    static_cast<size_t>(shape.row_bytes()));
      }
    }
  }
}

// Destinations start behind the own rank, so that ranks do not all store to rank 0 first.
void send_rank(Exchange const& exchange, size_t index) {
  RankCall const& rank = exchange.call.ranks[index];
  int const world = exchange.call.layout.world;
  for (int i = 1; i <= world; ++i) {
    int const dst_rank = (rank.rank() + i) % world;
    for (size_t t = 0; t < exchange.forms.size(); ++t) {
      send_block(exchange.inputs[index][t], exchange.forms[t], exchange.shape, rank.rank(),
                 dst_rank, rank.workspace.region(dst_rank, exchange.offset(t, dst_rank)));
    }
  }
}

// Every step runs for all ranks of this process before the next one: virtual ranks share a thread.
std::vector<Tensor> run(char const* op, std::vector<Tensor> const& inputs,
                        std::vector<int64_t> const& plan_words,
                        std::vector<Workspace> const& workspaces) {
  Exchange const exchange = open_exchange(op, inputs, plan_words, workspaces, false);
  RingCall const& call = exchange.call;
  for (RankCall const& rank : call.ranks) {
    announce_slots(rank.workspace, rank.taken.slot, call.free_slots());
  }
  for (size_t i = 0; i < call.ranks.size(); ++i) {
    RankCall const& rank = call.ranks[i];
    if (wait_for_slot(rank.workspace, rank.taken.slot)) send_rank(exchange, i);
  }
  for (RankCall const& rank : call.ranks) publish(rank.workspace, call_epoch(rank.workspace));
  std::vector<Tensor> outputs;
  for (RankCall const& rank : call.ranks) {
    bool const ok =
        wait_for_ranks(rank.workspace, call_epoch(rank.workspace) - 1, Phase::kA2aArrival);
    for (Tensor& output : received_tensors(exchange, rank)) {
      if (!ok) {
        std::memset(output.mutable_data_ptr(), 0xff,
                    static_cast<size_t>(output.numel() * element_bytes(exchange.shape.dtype)));
      }
      outputs.push_back(output);
    }
  }
  return outputs;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(xstage, CPU, m) {
  m.impl("ulysses_a2a", TORCH_BOX(&ulysses_a2a<run>));
  m.impl("ulysses_a2a_virtual", TORCH_BOX(&ulysses_a2a_virtual<run>));
}

}  // namespace xstage::cpu
