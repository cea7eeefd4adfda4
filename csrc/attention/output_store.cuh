// The way out of a finished tile: registers -> stmatrix -> swizzled shared memory of its own -> TMA
// tensor store into the owner's memory, local or remote.
//
// Each warpgroup has its own buffer (64 rows) and one storing thread, so that warpgroups never wait
// for each other here. The store is issued in slices of a few rows. All at once is a burst; some
// per step of the next tile's main loop is pacing: what is queued in an SM stays small, and loads
// do not queue behind it.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "common/ptx.cuh"
#include "loads.cuh"

namespace xstage {

constexpr int kGroupRows = 64;  // rows of a tile that one warpgroup computes

// Four 8x8 matrices of 16-bit elements, one row address per lane.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                            uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

template <class Element>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  cutlass::NumericArrayConverter<Element, float, 2> convert;
  cutlass::Array<float, 2> const pair{low, high};
  auto const packed = convert(pair);
  return reinterpret_cast<uint32_t const&>(packed);
}

// Writes an accumulator of 64 x kCols, times scale[row], into panels of 64 rows.
template <int kCols, class Element, class Fragment>
__device__ __forceinline__ void stage_output(Element* smem, Fragment const& acc,
                                             float const (&scale)[2], int thread) {
  int const lane = thread % 32;
  // Matrix m of a 16 x 16 block: rows 8 (m % 2) .., columns 8 (m / 2) ..; lane l names row l % 8 of
  // matrix l / 8.
  int const row = thread / 32 * 16 + lane % 16;
  uint32_t const row_address = smem_address(smem) + row * 128;
#pragma unroll
  for (int block = 0; block < kCols / 16; ++block) {
    int const chunk = block % 4 * 2 + lane / 16;
    uint32_t const address =
        row_address + block / 4 * (kGroupRows * 128) + ((chunk ^ (row % 8)) << 4);
    int const e = block * 8;
    stmatrix_x4(address, pack<Element>(acc(e) * scale[0], acc(e + 1) * scale[0]),
                pack<Element>(acc(e + 2) * scale[1], acc(e + 3) * scale[1]),
                pack<Element>(acc(e + 4) * scale[0], acc(e + 5) * scale[0]),
                pack<Element>(acc(e + 6) * scale[1], acc(e + 7) * scale[1]));
  }
}

// What is left to send of a warpgroup's buffer. Lives in shared memory: only the storing thread
// reads it, and the main loop has no registers to spare.
struct PendingStore {
  CUtensorMap const* map;
  TileCoord at;
  int32_t next_row;  // of the buffer; rows from end_row on are not sent
  int32_t end_row;
};

// Issues and commits the next `rows` rows (a multiple of 8, the box of the tensor map).
template <int kCols, class Element>
__device__ __forceinline__ void store_slice(PendingStore& pending, Element const* smem, int rows) {
#pragma unroll
  for (int panel = 0; panel < kCols / kPanelCols; ++panel) {
    cute::SM90_TMA_STORE_4D::copy(
        pending.map, smem + panel * kGroupRows * kPanelCols + pending.next_row * kPanelCols,
        panel * kPanelCols, pending.at.head, pending.at.row + pending.next_row, pending.at.batch);
  }
  bulk_commit();
  pending.next_row += rows;
}

template <int kCols, class Element>
__device__ __forceinline__ void store_rest(PendingStore& pending, Element const* smem, int rows) {
  while (pending.next_row < pending.end_row) store_slice<kCols>(pending, smem, rows);
}

}  // namespace xstage
