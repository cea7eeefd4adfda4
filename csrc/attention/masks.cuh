// Masks on a fragment of scores, and on rows of V that must not be read.
//
// Scores of one warpgroup: 64 rows. A thread holds rows `lane / 4` and `lane / 4 + 8` of its warp's
// 16, and of each row the columns 8 j + 2 (lane % 4) + {0, 1}. As a flat array: element
// 4 j + 2 r + i is row r, column block j, column i.
#pragma once

#include <cute/tensor.hpp>

#include "barriers.cuh"
#include "common/ptx.cuh"
#include "loads.cuh"

namespace xstage {

// First row of the calling thread in its warpgroup's 64; its second row is 8 further.
__device__ __forceinline__ int fragment_row(int thread) {
  return thread / 32 * 16 + thread % 32 / 4;
}

// Hides the columns from limit[r] on of the thread's row r.
template <class Fragment>
__device__ __forceinline__ void hide_columns(Fragment& scores, int thread, int const (&limit)[2]) {
  int const first_col = thread % 4 * 2;
#pragma unroll
  for (int e = 0; e < cute::size(scores); ++e) {
    int const col = e / 4 * 8 + e % 2;
    if (col >= limit[e / 2 % 2] - first_col) scores(e) = -INFINITY;
  }
}

// Zeroes rows [first, kRows) of a V tile. Their probabilities are zero, but zero times the NaN that
// may lie there is NaN. Every warpgroup clears for itself what it is going to read; two of them
// write the same zeros.
template <int kRows, int kCols, class Element>
__device__ __forceinline__ void clear_rows(Element* smem, int first, int thread) {
  // Swizzling moves 16-byte chunks inside a row only, so a whole row can be cleared in any order.
  constexpr int kChunks = kPanelCols * sizeof(Element) / 16;
  for (int i = first * kChunks + thread; i < kRows * kChunks; i += kWarpgroup) {
#pragma unroll
    for (int panel = 0; panel < kCols / kPanelCols; ++panel) {
      reinterpret_cast<uint4*>(smem + panel * kRows * kPanelCols)[i] = make_uint4(0, 0, 0, 0);
    }
  }
  fence_proxy_async_shared();
}

}  // namespace xstage
