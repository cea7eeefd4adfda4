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

// Everything about the block of one tensor that goes from one rank to another: pieces of it are
// found by a few additions.
struct A2aRoute {
  char const* source;
  char* destination;
  int64_t source_batch_stride;
  int64_t source_row_stride;
  int64_t source_run_stride;
  int64_t destination_batch_stride;
  int64_t destination_row_stride;
  int32_t rows;
  int32_t runs;  // contiguous runs per row
  int32_t run_bytes;
  int32_t chunk_rows;
  int32_t chunks_per_batch;
  int32_t chunks;
};

XS_HD A2aRoute make_route(A2aParams const& params, A2aRankParams const& rank, int t, int dst_rank) {
  A2aTensorParams const& tensor = params.tensors[t];
  A2aForm const& form = tensor.form;
  A2aBlock const block = block_between(form, static_cast<int>(rank.workspace.rank), dst_rank);
  int64_t const row_bytes = params.row_bytes;
  bool const adjacent = block.num_heads == 1 || rank.head_stride[t] == row_bytes;
  A2aRoute route{};
  route.source =
      rank.source[t] + block.src_row * rank.row_stride[t] + block.src_head * rank.head_stride[t];
  route.destination_row_stride = received_pitch(form, dst_rank, row_bytes);
  route.destination = rank.workspace.region(dst_rank, tensor.offset[dst_rank]) +
                      block.dst_row * route.destination_row_stride + block.dst_head * row_bytes;
  route.source_batch_stride = rank.batch_stride[t];
  route.source_row_stride = rank.row_stride[t];
  route.source_run_stride = rank.head_stride[t];
  route.destination_batch_stride = form.received_rows(dst_rank) * route.destination_row_stride;
  route.rows = block.num_rows;
  route.runs = adjacent ? 1 : block.num_heads;
  route.run_bytes = adjacent ? block.num_heads * params.row_bytes : params.row_bytes;
  route.chunk_rows = tensor.chunk_rows;
  route.chunks_per_batch = block.num_heads == 0 ? 0 : ceil_div(block.num_rows, tensor.chunk_rows);
  route.chunks = params.batch * route.chunks_per_batch;
  return route;
}

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

XS_HD A2aChunk chunk_of(A2aRoute const& route, int32_t index) {
  int32_t const b = index < route.chunks_per_batch ? 0 : index / route.chunks_per_batch;
  int32_t const row = (index - b * route.chunks_per_batch) * route.chunk_rows;
  return {
      route.source + b * route.source_batch_stride + row * route.source_row_stride,
      route.destination + b * route.destination_batch_stride + row * route.destination_row_stride,
      route.source_row_stride,
      route.source_run_stride,
      route.destination_row_stride,
      min_of(route.chunk_rows, route.rows - row),
      route.runs,
      route.run_bytes};
}

}  // namespace xstage
