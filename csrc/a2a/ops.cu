// CUDA forms of ulysses_a2a and ulysses_a2a_virtual: one kernel per call.
#include "attention/stream_order.h"
#include "call.h"
#include "common/launch.h"
#include "kernel_sm90.cuh"

namespace xstage {
namespace {

// What a call takes unless its plan says otherwise (measured, csrc/a2a/README.md): a small call at
// most half of the SMs, so that the blocks of the next one are there when it ends; a large one enough
// to fill the link.
constexpr int kVectorSms = 32;  // of a small call by 16-byte stores
constexpr int kSmallSms = 64;
constexpr int kLargeSms = 131;
constexpr int64_t kSmallBytes = 8 << 20;
constexpr int64_t kVectorBytes = 1 << 20;  // below, 16-byte stores instead of bulk copies
constexpr int64_t kSmallestChunk = 2048;

enum class Mover { kBulk, kVector16, kVector2 };

bool aligned(A2aParams const& params, size_t num_ranks) {
  int64_t bits = params.row_bytes;
  for (size_t r = 0; r < num_ranks; ++r) {
    for (int t = 0; t < params.num_tensors; ++t) {
      A2aRankParams const& rank = params.ranks[r];
      bits |= reinterpret_cast<int64_t>(rank.source[t]) | rank.batch_stride[t] |
              rank.row_stride[t] | rank.head_stride[t];
    }
  }
  return bits % 16 == 0;
}

// Bytes that one rank sends in a call, its own share included.
int64_t sent_bytes(Exchange const& exchange) {
  int64_t most = 0;
  for (int r = 0; r < exchange.call.layout.world; ++r) {
    int64_t sent = 0;
    for (A2aForm const& form : exchange.forms) {
      sent += int64_t{form.sent_rows(r)} * form.sent_heads(r) * exchange.shape.batch *
              exchange.shape.row_bytes();
    }
    most = max_of(most, sent);
  }
  return most;
}

// Rows of a tensor that make a chunk: so many that every block has one for every destination, but
// never more than a stage holds.
int32_t rows_per_chunk(Exchange const& exchange, A2aForm const& form, int64_t blocks) {
  int64_t heads = 1;
  for (int r = 0; r < form.world; ++r) heads = max_of<int64_t>(heads, form.heads[r].count);
  int64_t const line = heads * exchange.shape.row_bytes();
  int64_t const share = ceil_div(sent_bytes(exchange), blocks * form.world);
  int64_t const rows = ceil_div(max_of(kSmallestChunk, share), line);
  return static_cast<int32_t>(max_of<int64_t>(1, min_of(rows, kStageBytes / line)));
}

void fill_rank(A2aRankParams& rank, Exchange const& exchange, size_t index) {
  rank.workspace = exchange.call.ranks[index].workspace;
  int64_t const element = element_bytes(exchange.shape.dtype);
  for (size_t t = 0; t < exchange.forms.size(); ++t) {
    Tensor const& input = exchange.inputs[index][t];
    OperandStrides const stride = operand_strides(input);
    rank.source[t] = static_cast<char const*>(input.const_data_ptr());
    // The stride of a dimension of one element says nothing.
    rank.batch_stride[t] = input.size(0) == 1 ? 0 : stride.batch * element;
    rank.row_stride[t] = input.size(1) == 1 ? 0 : stride.row * element;
    rank.head_stride[t] = (input.size(2) == 1 ? input.size(3) : stride.head) * element;
  }
}

A2aParams make_params(Exchange const& exchange, int64_t blocks) {
  A2aParams params{};
  params.num_tensors = static_cast<int32_t>(exchange.forms.size());
  params.batch = static_cast<int32_t>(exchange.shape.batch);
  params.row_bytes = static_cast<int32_t>(exchange.shape.row_bytes());
  params.slot = exchange.call.slot_index();
  params.slot_offset = exchange.call.ring.offset(params.slot);
  params.slot_bytes = exchange.slot_bytes();
  params.free_slots = exchange.call.free_slots();
  for (size_t t = 0; t < exchange.forms.size(); ++t) {
    params.tensors[t].form = exchange.forms[t];
    params.tensors[t].chunk_rows = rows_per_chunk(exchange, exchange.forms[t], blocks);
    for (int r = 0; r < exchange.call.layout.world; ++r) {
      params.tensors[t].offset[r] = exchange.offset(t, r);
    }
  }
  for (size_t i = 0; i < exchange.call.ranks.size(); ++i) {
    fill_rank(params.ranks[i], exchange, i);
    for (int dst = 0; dst < exchange.call.layout.world; ++dst) {
      int32_t chunks = 0;
      for (int t = 0; t < params.num_tensors; ++t) {
        chunks += make_route(params, params.ranks[i], t, dst).chunks;
      }
      params.chunks = max_of(params.chunks, chunks);
    }
  }
  return params;
}

// A line is what one row of a block takes; the bulk path stages whole lines.
bool lines_fit(A2aParams const& params) {
  for (int t = 0; t < params.num_tensors; ++t) {
    A2aForm const& form = params.tensors[t].form;
    for (int r = 0; r < form.world; ++r) {
      if (static_cast<int64_t>(form.heads[r].count) * params.row_bytes > kStageBytes) return false;
    }
  }
  return true;
}

// The plan's default (kTensor) leaves the choice between bulk and 16-byte stores to the size.
Mover choose_mover(A2aParams const& params, size_t num_ranks, StorePath path, int64_t sent) {
  if (!aligned(params, num_ranks)) return Mover::kVector2;
  if (path == StorePath::kVector || !lines_fit(params)) return Mover::kVector16;
  bool const few = sent < kVectorBytes;
  return path == StorePath::kTensor && few ? Mover::kVector16 : Mover::kBulk;
}

int64_t sms_of(AttentionPlan const& plan, Mover mover, int64_t sent) {
  if (plan.num_sms != 0) return plan.num_sms;
  if (sent >= kSmallBytes) return kLargeSms;
  return mover == Mover::kBulk ? kSmallSms : kVectorSms;
}

struct Kernel {
  void (*entry)(A2aParams);
  unsigned threads;
  int blocks_per_sm;
  size_t shared_bytes;
};

Kernel kernel_of(Mover mover) {
  switch (mover) {
    case Mover::kVector16:
      return {&a2a_vector_kernel<uint4>, kVectorThreads, kVectorBlocksPerSm, 0};
    case Mover::kVector2:
      return {&a2a_vector_kernel<uint16_t>, kVectorThreads, kVectorBlocksPerSm, 0};
    default:
      return {&a2a_bulk_kernel, kBulkThreads, 1, sizeof(BulkStorage)};
  }
}

// Virtual ranks wait for each other within the launch, so all their blocks must run at once.
void launch(Exchange const& exchange, cudaStream_t stream) {
  int64_t const ranks = static_cast<int64_t>(exchange.call.ranks.size());
  AttentionPlan const& plan = exchange.call.plan;
  int64_t const sent = sent_bytes(exchange);
  // The mover depends on alignment and size only: any number of blocks will do to find it.
  Mover const mover = choose_mover(make_params(exchange, 1), exchange.call.ranks.size(),
                                   static_cast<StorePath>(plan.store_path), sent);
  Kernel const kernel = kernel_of(mover);
  int64_t blocks = max_of<int64_t>(1, sms_of(plan, mover, sent) * kernel.blocks_per_sm / ranks);
  A2aParams const params = make_params(exchange, blocks);
  if (plan.num_sms == 0 && sent >= kSmallBytes) {
    // No more than the same number of rounds takes, so that the last one is full.
    int64_t const pieces = int64_t{params.chunks} * plan.world;
    blocks = ceil_div(pieces, ceil_div(pieces, blocks));
  }
  XS_CUDA(cudaFuncSetAttribute(kernel.entry, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(kernel.shared_bytes)));
  dim3 const grid(static_cast<unsigned>(blocks), static_cast<unsigned>(ranks));
  LaunchKind const kind = ranks > 1 ? LaunchKind::kCooperative : LaunchKind::kEarly;
  launch_kernel(kernel.entry, {grid, kernel.threads, kernel.shared_bytes, stream, kind}, params);
}

std::vector<Tensor> run(char const* op, std::vector<Tensor> const& inputs,
                        std::vector<int64_t> const& plan,
                        std::vector<Workspace> const& workspaces) {
  XS_CHECK(!inputs.empty(), "xstage.", op, ": inputs: expected at least one tensor per rank");
  DeviceGuard const guard(inputs.front().get_device_index());
  cudaStream_t const stream = current_stream(inputs.front());
  Exchange const exchange = open_exchange(op, inputs, plan, workspaces, is_capturing(stream));
  follow_last_stream(exchange.call, stream);
  launch(exchange, stream);
  std::vector<Tensor> outputs;
  for (RankCall const& rank : exchange.call.ranks) {
    for (Tensor& output : received_tensors(exchange, rank)) outputs.push_back(output);
  }
  return outputs;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(xstage, CUDA, m) {
  m.impl("ulysses_a2a", TORCH_BOX(&ulysses_a2a<run>));
  m.impl("ulysses_a2a_virtual", TORCH_BOX(&ulysses_a2a_virtual<run>));
}

}  // namespace xstage
