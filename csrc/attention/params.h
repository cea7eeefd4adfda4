// What an attention kernel gets: plain values, tensor maps, addresses. By value, for one rank.
#pragma once

#include <cuda.h>

#include "key_cursor.h"
#include "layout.h"

namespace xstage {

struct AttentionParams {
  // Boxes are one panel of 64 columns wide (loads.cuh) and, in rows: 64 for q, block_n for k and v,
  // slice_rows for out. out[j]: this rank's heads of rank j's rows, in rank j's memory.
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap out[kMaxRanks];

  TileSchedule schedule;
  int32_t num_rounds;  // in which the grid takes the tiles
  KeySpace keys;
  float scale_log2;    // softmax scale times log2(e)
  int32_t kv_group;    // query heads per key head
  int32_t head_phase;  // of the first local query head in its group
  float* lse;          // [B, H, Sq] or null

  // Output stores: rows of a warpgroup per slice, and the steps of the next main loop between two
  // slices (0: all slices at once, when the tile is finished).
  int32_t slice_rows;
  int32_t slice_steps;
  bool wait_every_tile;  // the completion-coupled counterfactual

  // Where the end of the call is published; world 0 when nobody else takes part.
  Workspace workspace;
  uint8_t const* refused;  // not zero: this rank may not store; null when nobody else takes part
};

}  // namespace xstage
