// Sizes of the sm_90a kernel: tile, pipeline, warps, registers, shared memory.
#pragma once

#include <cstdint>

#include "plan.h"

namespace xstage {

struct MegaMoeTraits {
  static constexpr int kBlockM = 128;  // rows of a tile: two math warpgroups of 64
  static constexpr int kBlockN = 256;  // columns; Linear-1: 128 of gate and 128 of up
  static constexpr int kBlockK = 64;   // one swizzled row of 128 bytes
  static constexpr int kStages = 4;
  static constexpr int kCluster = 2;

  static constexpr int kMathWarps = 8;
  static constexpr int kFirstDispatchWarp = 2;
  static constexpr int kDispatchWarps = xstage::kDispatchWarps;  // 0 loads, 1 schedules, 2 and 3
  static constexpr int kThreads = 384;
  static constexpr int kDataRegisters = 104;  // warps 0 to 3
  static constexpr int kMathRegisters = 200;  // 128 accumulators, 32 for the held half tile

  // A math warp stages 8 rows of 512 bytes. 16 bytes of padding keep stmatrix free of conflicts;
  // a row stays in one piece, as a bulk copy needs it.
  static constexpr int kStagingRow = 2 * kBlockN + 16;
  static constexpr int kStagingRows = 8;
  static constexpr int kWarpRows = 16;  // rows of a tile that a math warp owns
  // What a tile adds to the counters of its block: two per math warp, or by other numbers of warps
  // where the CTAs of a cluster share blocks out (TileShare::kSplit).
  static constexpr int kTileCount = 2 * kMathWarps;

  static constexpr int kTileQueue = 8;
  // The loader tells the scheduler to prepare the next tile so many steps before this one's end.
  static constexpr int kLookAhead = 20;
  // Clusters draw tiles from a counter (tickets) instead of taking every n-th of the sequence.
  static constexpr bool kTickets = true;

  // Steps of the next main loop before the held half tile is written to shared memory.
  static constexpr int kHeldSteps = 3;
  // Steps of the next main loop before a tile is announced (kLinear1Done, kLinear2Done), so that
  // the release finds the stores of Linear-1 complete.
  static constexpr int kPublishSteps = 3;

  static_assert(kDataRegisters * 128 + kMathRegisters * 256 <= 168 * kThreads,
                "setmaxnreg redistributes what the launch bound allots");
  static_assert(kTileQueue >= kStages + 4, "an entry is read until its tile has left the stages");
};

// Named barriers; 0 is __syncthreads. kMathGroup: one per math warpgroup, 3 and 4.
enum class NamedBarrier : int { kTilesDone = 2, kMathGroup = 3, kCombined = 5, kRanksDone = 6 };

}  // namespace xstage
