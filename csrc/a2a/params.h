// What the All-to-All's kernels get, by value.
#pragma once

#include "layout.h"

namespace xstage {

// One tensor of the call, as all ranks see it.
struct A2aTensorParams {
  A2aForm form;
  int64_t offset[kMaxRanks];  // bytes from the start of the region of the rank that receives it
  int32_t chunk_rows;         // rows that one block moves at a time
};

// One rank that this launch plays. Strides in bytes; heads that lie side by side are one run.
struct A2aRankParams {
  Workspace workspace;
  char const* source[kMaxA2aTensors];
  int64_t batch_stride[kMaxA2aTensors];
  int64_t row_stride[kMaxA2aTensors];
  int64_t head_stride[kMaxA2aTensors];
};

struct A2aParams {
  A2aTensorParams tensors[kMaxA2aTensors];
  A2aRankParams ranks[kMaxRanks];
  int64_t slot_bytes;   // of this rank's results, for the poison of a call that was given up
  int64_t slot_offset;  // of the slot within the region
  int32_t num_tensors;
  int32_t batch;
  int32_t row_bytes;  // one head of one row
  int32_t chunks;     // most chunks that any rank sends to any rank
  int32_t slot;
  uint32_t free_slots;
};

// A piece of one tensor: `rows` rows of `runs` runs of run_bytes contiguous bytes.
struct A2aChunk {
  char const* source;
  char* destination;
  int64_t source_row_stride;
  int64_t source_run_stride;
  int64_t destination_row_stride;
  int32_t rows;
  int32_t runs;
  int32_t run_bytes;
};

XS_HD int32_t chunks_of_block(A2aTensorParams const& tensor, A2aBlock const& block, int32_t batch) {
  return block.num_heads == 0 ? 0 : batch * ceil_div(block.num_rows, tensor.chunk_rows);
}

XS_HD int32_t chunks_between(A2aParams const& params, int src_rank, int dst_rank) {
  int32_t chunks = 0;
  for (int t = 0; t < params.num_tensors; ++t) {
    A2aTensorParams const& tensor = params.tensors[t];
    chunks += chunks_of_block(tensor, block_between(tensor.form, src_rank, dst_rank), params.batch);
  }
  return chunks;
}

// The index-th chunk that `rank` sends to dst_rank; false when there are fewer.
XS_HD bool find_chunk(A2aParams const& params, A2aRankParams const& rank, int dst_rank,
                      int32_t index, A2aChunk& chunk) {
  for (int t = 0; t < params.num_tensors; ++t) {
    A2aTensorParams const& tensor = params.tensors[t];
    A2aBlock const block =
        block_between(tensor.form, static_cast<int>(rank.workspace.rank), dst_rank);
    int32_t const chunks = chunks_of_block(tensor, block, params.batch);
    if (index >= chunks) {
      index -= chunks;
      continue;
    }
    int32_t const per_batch = ceil_div(block.num_rows, tensor.chunk_rows);
    int32_t const b = index / per_batch;
    int32_t const row = index % per_batch * tensor.chunk_rows;
    int64_t const row_bytes = params.row_bytes;
    bool const adjacent = block.num_heads == 1 || rank.head_stride[t] == row_bytes;
    chunk.source = rank.source[t] + b * rank.batch_stride[t] +
                   (block.src_row + row) * rank.row_stride[t] +
                   block.src_head * rank.head_stride[t];
    chunk.destination =
        rank.workspace.region(dst_rank, tensor.offset[dst_rank]) +
        bshd_offset(b, block.dst_row + row, block.dst_head, tensor.form.received_rows(dst_rank),
                    tensor.form.received_heads(dst_rank), row_bytes);
    chunk.source_row_stride = rank.row_stride[t];
    chunk.source_run_stride = rank.head_stride[t];
    chunk.destination_row_stride = tensor.form.received_heads(dst_rank) * row_bytes;
    chunk.rows = min_of(tensor.chunk_rows, block.num_rows - row);
    chunk.runs = adjacent ? 1 : block.num_heads;
    chunk.run_bytes = adjacent ? block.num_heads * params.row_bytes : params.row_bytes;
    return true;
  }
  return false;
}

}  // namespace xstage
