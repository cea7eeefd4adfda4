// Rows of tokens, copied by whole warps, through registers (push.cuh, receive.cuh).
#pragma once

#include <cstdint>

namespace xstage {

constexpr int32_t kGroupBytes = 16 << 10;  // moved between two announcements

// Up to 4 KiB of a row, in the registers of one warp: 16 bytes per lane and load. By assembly: the
// compiler would make an address of its own for each load.
struct RowPiece {
  static constexpr int kLoads = 8;
  static constexpr int32_t kBytes = kLoads * 512;
  uint4 values[kLoads];

  // `bytes` from `from` on, which is this lane's first 16.
  template <int kLoad>
  __device__ __forceinline__ void load(char const* from, int32_t bytes) {
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.gt.s32 wanted, %5, %6;\n"
        "@wanted ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4 + %6];\n"
        "}"
        : "=r"(values[kLoad].x), "=r"(values[kLoad].y), "=r"(values[kLoad].z), "=r"(values[kLoad].w)
        : "l"(from), "r"(bytes), "n"(kLoad * 512)
        : "memory");
    if constexpr (kLoad + 1 < kLoads) load<kLoad + 1>(from, bytes);
  }
  template <int kStore>
  __device__ __forceinline__ void store(char* to, int32_t bytes) const {
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.gt.s32 wanted, %5, %6;\n"
        "@wanted st.global.v4.u32 [%4 + %6], {%0, %1, %2, %3};\n"
        "}" ::"r"(values[kStore].x),
        "r"(values[kStore].y), "r"(values[kStore].z), "r"(values[kStore].w), "l"(to), "r"(bytes),
        "n"(kStore * 512)
        : "memory");
    if constexpr (kStore + 1 < kLoads) store<kStore + 1>(to, bytes);
  }
};

// Copies one row; whole warp. `meanwhile` runs behind the loads of each piece.
template <class Meanwhile>
__device__ __forceinline__ void move_row(char const* from, char* to, int32_t row_bytes,
                                         Meanwhile meanwhile) {
  int32_t const offset = static_cast<int32_t>(threadIdx.x % 32) * 16;
#pragma unroll 1
  for (int32_t at = offset; at - offset < row_bytes; at += RowPiece::kBytes) {
    RowPiece piece;
    piece.load<0>(from + at, row_bytes - at);
    meanwhile();
    piece.store<0>(to + at, row_bytes - at);
  }
}

// The same for a row per bit of `lanes`, from from_row(l) to to_row(l) for lane l.
template <class From, class To, class Meanwhile>
__device__ __forceinline__ void move_rows(uint32_t lanes, int32_t row_bytes, From from_row,
                                          To to_row, Meanwhile meanwhile) {
#pragma unroll 1
  for (; lanes != 0; lanes &= lanes - 1) {
    int const lane = __ffs(lanes) - 1;
    move_row(from_row(lane), to_row(lane), row_bytes, meanwhile);
  }
}

// A value of another lane.
__device__ __forceinline__ int32_t of_lane(int32_t value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
__device__ __forceinline__ char const* of_lane(char const* value, int lane) {
  return reinterpret_cast<char const*>(
      __shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(value), lane));
}

}  // namespace xstage
