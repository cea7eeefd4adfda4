// CUDA operators of both attention generations: what they share. A generation is a table of
// compiled kernels; checks, slots, tensor maps and the order of launches are the same.
#pragma once

#include "common/launch.h"
#include "ops.h"
#include "params.h"

namespace xstage::cuda {

// One compiled kernel.
struct Instance {
  ScalarType dtype;
  int head_dim;
  bool causal;
  int block_m;
  int block_n;
  void (*launch)(AttentionParams const& params, int num_blocks, cudaStream_t stream,
                 LaunchKind kind);
};

// The first instance that fits is the default of its head size, dtype and causality.
using Generation = std::vector<Instance>;

std::tuple<Tensor, Tensor> attention(char const* op, Generation const& generation, Tensor const& q,
                                     Tensor const& k, Tensor const& v,
                                     AttentionOptions const& options, int64_t head_phase,
                                     std::vector<int64_t> const& plan_words);

// One result per rank that this process plays. Launches: grant of the output slot, the attention
// kernel of each rank, the wait for all ranks. Neighbours overlap (common/launch.h): tiles
// are computed while the slot is being granted, and the wait is there before the last tile's
// signal.
std::vector<RankResult> attention_a2a(char const* op, Generation const& generation,
                                      std::vector<RankOperands> const& operands,
                                      AttentionOptions const& options,
                                      std::vector<int64_t> const& plan_words,
                                      std::vector<Workspace> const& workspaces);

}  // namespace xstage::cuda
