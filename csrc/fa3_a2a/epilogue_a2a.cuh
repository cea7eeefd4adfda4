// From accumulators to the owner's memory.
//
// A warpgroup waits for its own buffer only, and only here: the bytes of its last tile have long
// been read unless the link is slower than a whole tile. Nothing waits for the stores themselves;
// the call's end does (attention/completion.cuh).
#pragma once

#include "attention/completion.cuh"
#include "attention/masks.cuh"
#include "attention/output_store.cuh"
#include "attention/params.h"
#include "traits_sm90.h"

namespace xstage {

template <class Traits>
class Epilogue {
 public:
  using Storage = Fa3SharedStorage<Traits>;
  static constexpr int kCols = Traits::kHeadDim;

  __device__ __forceinline__ Epilogue(AttentionParams const& params, Storage& smem, int group,
                                      int thread)
      : params_(params), smem_(smem), group_(group), thread_(thread) {
    if (thread_ == 0) smem_.pending[group_].next_row = smem_.pending[group_].end_row = 0;
  }

  // Once per step of the main loop: a slice of the last tile, when its time has come. One countdown,
  // which only the storing thread ever starts, so that a step costs a decrement and no way round.
  __device__ __forceinline__ void each_step() {
    if (__builtin_expect(--steps_left_ != 0, 1)) return;
    PendingStore& pending = smem_.pending[group_];
    store_slice<kCols>(pending, smem_.o[group_], params_.slice_rows);
    steps_left_ =
        pending.next_row < pending.end_row ? static_cast<uint32_t>(params_.slice_steps) : kNever;
  }

  // Stages a finished tile, its rows times `scale`, and sends it or leaves its slices to the steps to
  // come.
  template <class Fragment>
  __device__ __forceinline__ void store(QueryTile const& tile, Fragment const& acc,
                                        float const (&scale)[2]) {
    uint32_t const refused = claim_buffer();
    stage_output<kCols>(smem_.o[group_], acc, scale, thread_);
    send_buffer(tile, refused);
  }

  // Natural logarithm of the sum of exponentials; stays on this rank.
  __device__ __forceinline__ void store_lse(QueryTile const& tile, float const (&lse)[2]) const {
    if (params_.lse == nullptr || thread_ % 4 != 0) return;
    int const row = group_ * kGroupRows + fragment_row(thread_);
    int64_t const head = static_cast<int64_t>(tile.batch) * params_.schedule.num_heads + tile.head;
    float* const at = params_.lse + head * params_.keys.num_query_rows + tile.row;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r < tile.num_rows) at[row + 8 * r] = lse[r];
    }
  }

  // After the last tile: everything of this warpgroup is sent and written.
  __device__ __forceinline__ void finish() {
    if (thread_ == 0) {
      store_rest<kCols>(smem_.pending[group_], smem_.o[group_], params_.slice_rows);
      announce_end();
      bulk_wait<0>();
    }
  }

 private:
  // Returns whether stores are refused, in the storing thread: asked here, needed behind staging.
  __device__ __forceinline__ uint32_t claim_buffer() {
    uint32_t refused = 0;
    if (thread_ == 0) {
      refused = stores_refused(params_.refused);
      store_rest<kCols>(smem_.pending[group_], smem_.o[group_], params_.slice_rows);
      bulk_wait_read<0>();
    }
    sync_group();
    return refused;
  }

  // All threads of the group have written their part.
  __device__ __forceinline__ void send_buffer(QueryTile const& tile, uint32_t refused) {
    fence_proxy_async_shared();
    sync_group();
    int const num_rows = min_of(kGroupRows, tile.num_rows - group_ * kGroupRows);
    if (thread_ != 0) return;
    PendingStore& pending = smem_.pending[group_];
    pending.map = &params_.out[tile.owner];
    pending.at = {tile.owner_row + group_ * kGroupRows, tile.head, tile.batch};
    pending.next_row = 0;
    pending.end_row = refused == 0 ? num_rows : 0;
    if (params_.slice_steps != 0) {
      steps_left_ = pending.end_row > 0 ? static_cast<uint32_t>(params_.slice_steps) : kNever;
      return;
    }
    store_rest<kCols>(pending, smem_.o[group_], params_.slice_rows);
    if (params_.wait_every_tile) bulk_wait_visible();
  }

  __device__ __forceinline__ void sync_group() const {
    cutlass::arch::NamedBarrier::sync(kWarpgroup, kStagedBarrier + group_);
  }

  AttentionParams const& params_;
  Storage& smem_;
  int group_;
  int thread_;
  static constexpr uint32_t kNever = 0;  // a countdown from zero takes 2^32 steps
  uint32_t steps_left_ = kNever;         // until the next slice
};

}  // namespace xstage
