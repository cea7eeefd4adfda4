// What the attention kernel gets: plain values, tensor maps, addresses. By value, one per rank.
#pragma once

#include <cuda.h>

#include "attention/key_cursor.h"
#include "attention/layout.h"

namespace xstage {

struct Fa3Params {
  CUtensorMap q;               // [B, Sq, H, D], box 64 x 64
  CUtensorMap k;               // [B, Sk, Hk, D], box 64 x block_n
  CUtensorMap v;               // as k
  CUtensorMap out[kMaxRanks];  // out[j]: this rank's heads of rank j's rows, box 64 x slice_rows

  TileSchedule schedule;
  KeySpace keys;
  float scale_log2;    // softmax scale times log2(e)
  int32_t kv_group;    // query heads per key head
  int32_t head_phase;  // of the first local query head in its group
  float* lse;          // [B, H, Sq] or null

  // Output stores: rows per slice, and the steps of the next main loop between two slices
  // (0: all slices at once, when the tile is finished).
  int32_t slice_rows;
  int32_t slice_steps;
  bool wait_every_tile;  // the completion-coupled counterfactual

  Workspace workspace;  // unused (world 0) by attention alone
};

}  // namespace xstage
