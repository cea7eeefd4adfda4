// What the kernel gets: the plan, where everything lies, the tensors of this call, tensor maps.
//
// One block of parameters per rank that a launch plays: one, or all virtual ranks of a world.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "common/workspace.h"
#include "layout.h"
#include "plan.h"

namespace xstage {

struct MegaMoeParams {
  // Tensor maps; a box is 64 elements (128 bytes, swizzled) by 64 or 128 rows.
  CUtensorMap x_ring;  // (hidden, x_ring_blocks * block_m), box 64 x 64
  CUtensorMap h_ring;  // (intermediate, h_ring_blocks * block_m), box 64 x 64
  CUtensorMap w13;     // (hidden, intermediate, gate or up, local expert), box 64 x 64 x 1 x 1
  CUtensorMap w2;      // (intermediate, hidden, local expert), box 64 x 128 x 1

  MegaMoePlan plan;
  MegaMoeLayout layout;
  Workspace workspace;

  __nv_bfloat16 const* x;     // [tokens][hidden]
  void const* topk_idx;       // [tokens][topk], int32 or int64; outside 0 .. num_experts - 1: skip
  float const* topk_weights;  // [tokens][topk]
  __nv_bfloat16* y;           // [tokens][hidden]
  void const* num_tokens;     // rows of x that are tokens, on the device, int32 or int64; null: all
  int64_t* expert_load;       // [local experts], += rows received; or null
  float clamp;                // gate at most clamp, up within +-clamp; infinity: no clamp
  float routed_scale;
  int64_t* trace;         // trace build only: see trace.cuh; or null
  int32_t trace_records;  // per CTA and track
  int32_t rows;           // of x and y
  bool idx_is_64;
  bool num_tokens_is_64;

  XS_HD MegaMoeView view(int64_t of_rank) const { return MegaMoeView{workspace.region(of_rank)}; }
};

struct MegaMoeLaunch {
  MegaMoeParams ranks[kMaxRanks];
};

}  // namespace xstage
