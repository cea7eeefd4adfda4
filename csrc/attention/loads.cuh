// TMA loads of attention operands. A tile of R rows and D columns lies in shared memory as D / 64
// panels of R rows of 128 bytes each, swizzled in groups of 8 rows: what wgmma reads, both as a
// K-major operand (Q, K) and as an MN-major one (V).
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "barriers.cuh"

namespace xstage {

constexpr int kPanelCols = 64;  // 128 bytes of a 16-bit type: the widest swizzle

// Where a tile starts in a [B, S, H, D] tensor.
struct TileCoord {
  int32_t row;
  int32_t head;
  int32_t batch;
};

enum class Reuse : uint64_t {
  kOnce = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST),
  kMany = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST)
};

// One thread. Rows past the end of the tensor arrive as zeros and still count as bytes.
template <int kRows, int kCols, class Element>
__device__ __forceinline__ void load_tile(CUtensorMap const& map, MBarrier& full, Element* smem,
                                          TileCoord at, Reuse reuse) {
  full.arrive_and_expect_tx(kRows * kCols * sizeof(Element));
#pragma unroll
  for (int panel = 0; panel < kCols / kPanelCols; ++panel) {
    cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&full),
                                 static_cast<uint64_t>(reuse), smem + panel * kRows * kPanelCols,
                                 panel * kPanelCols, at.head, at.row, at.batch);
  }
}

}  // namespace xstage
