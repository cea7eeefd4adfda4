// The key blocks of one query tile, in the order in which the main loop takes them: runs of valid
// keys from the last to the first, and each run from its end to its beginning. Blocks start at the
// beginning of their run, so that only the last block of a run is partial.
//
// Host and device: the warp that loads and the warps that multiply walk the same cursor.
#pragma once

#include "layout.h"

namespace xstage {

struct KeyBlockView {
  int32_t begin;      // first key
  int32_t num_valid;  // keys that some row of the tile may see, 1 to block_n
};

// What the keys of one call look like.
struct KeySpace {
  int32_t num_query_rows;
  int32_t num_keys;
  int32_t const* segments;  // [B, num_segments, 2], or null: every key is valid
  int32_t num_segments;
};

template <int kBlockN>
class KeyCursor {
 public:
  // `limit`: keys from here on are hidden from every row of the tile.
  XS_HD KeyCursor(KeySpace const& space, int32_t batch, int32_t limit)
      : segments_(space.segments == nullptr ? nullptr
                                            : space.segments + 2 * batch * space.num_segments),
        run_(space.segments == nullptr ? 1 : space.num_segments),
        limit_(min_of(limit, space.num_keys)) {
    next_run();
  }

  XS_HD bool done() const { return block_ < 0; }

  XS_HD KeyBlockView view() const {
    int32_t const begin = run_begin_ + block_ * kBlockN;
    return {begin, min_of(kBlockN, run_end_ - begin)};
  }

  XS_HD void advance() {
    if (--block_ < 0) next_run();
  }

 private:
  XS_HD void next_run() {
    while (run_ > 0) {
      --run_;
      run_begin_ = segments_ == nullptr ? 0 : max_of(0, segments_[2 * run_]);
      run_end_ = segments_ == nullptr ? limit_ : min_of(limit_, segments_[2 * run_ + 1]);
      if (run_end_ > run_begin_) {
        block_ = ceil_div(run_end_ - run_begin_, kBlockN) - 1;
        return;
      }
    }
    block_ = -1;
  }

  int32_t const* segments_;
  int32_t run_;
  int32_t limit_;
  int32_t run_begin_ = 0;
  int32_t run_end_ = 0;
  int32_t block_ = -1;
};

}  // namespace xstage
