// Arguments of the main-loop kernel, apart from its CuTe types so that ops.cu need not compile
// them.
#pragma once

#include <cuda.h>

#include "burst/burst.cuh"

namespace xstage {

constexpr int kLoopM = 128;
constexpr int kLoopN = 128;
constexpr int kLoopK = 64;
static_assert(kLoopM == kLoopN, "a and b share their TMA box");

struct LoopParams {
  Workspace workspace;
  BurstLoopPlan plan;
  BurstHead* heads;  // [blocks]
  int4* stamps;      // [blocks, tiles]
  int num_b_tiles;
  CUtensorMap a_map;
  CUtensorMap b_map;
};

}  // namespace xstage
