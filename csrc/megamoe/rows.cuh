// Rows of tokens on their way: copied by whole warps, through registers.
#pragma once

#include <cstdint>

namespace xstage {

constexpr int kRowBatch = 16;              // rows that a warp works out together, one per lane
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

// Copies one row per bit of `lanes`: lane l holds the addresses of its own. Whole warp. `meanwhile`
// runs behind the loads of each piece.
template <class Meanwhile>
__device__ __forceinline__ void move_rows(uint32_t lanes, char const* from, char* to,
                                          int32_t row_bytes, Meanwhile meanwhile) {
  int32_t const offset = static_cast<int32_t>(threadIdx.x % 32) * 16;
  auto const of_lane = [](auto pointer, int lane) {
    return reinterpret_cast<decltype(pointer)>(
        __shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(pointer), lane));
  };
#pragma unroll 1
  for (; lanes != 0; lanes &= lanes - 1) {
    int const lane = __ffs(lanes) - 1;
    char const* const row_from = of_lane(from, lane);
    char* const row_to = of_lane(to, lane);
#pragma unroll 1
    for (int32_t start = offset; start - offset < row_bytes; start += RowPiece::kBytes) {
      RowPiece piece;
      piece.load<0>(row_from + start, row_bytes - start);
      meanwhile();
      piece.store<0>(row_to + start, row_bytes - start);
    }
  }
}

}  // namespace xstage
