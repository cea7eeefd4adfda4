// Attention on the CPU: exact and slow. fp32 throughout, online softmax over the same tiles, in the
// same order and with the same borders as the kernels; every output row goes straight to its owner.
#pragma once

#include "problem.h"

namespace xstage::cpu {

// Where the output of a rank's tiles goes: base[j] is rank j's [B, rows of j, total_heads, D].
struct OutputTarget {
  void* base[kMaxRanks];
  Partition rows;
  int64_t total_heads;
  int64_t first_head;  // place of this rank's head 0 among all heads
};

// One rank's operands and results.
struct AttendArguments {
  void const* q;
  void const* k;
  void const* v;
  int32_t const* segments;  // [B, num_segments, 2] or null
  float* lse;               // [B, heads, Sq] or null
  OutputTarget out;
};

void attend(AttentionProblem const& problem, TileSchedule const& schedule,
            AttendArguments const& arguments);

constexpr int64_t kDefaultBlockM = 64;
constexpr int64_t kDefaultBlockN = 64;

}  // namespace xstage::cpu
