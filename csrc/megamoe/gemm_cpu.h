// The matrix product of a tile on the CPU: bf16 operands, fp32 sums, k in ascending order.
//
// Every element of the result is summed up on its own, k = 0, 1, 2, ... . It therefore does not
// depend on the tile's size or place, and results are bitwise the same for every plan.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace xstage::cpu {

inline float to_float(uint16_t bits) {
  uint32_t const wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// Round to nearest, ties to even; NaN stays NaN.
inline uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (value != value) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

constexpr int64_t kPanel = 16;  // columns that are summed up side by side

// Rows of A as fp32, made once per tile.
struct RowBlock {
  std::vector<float> values;  // [rows][depth]
  int64_t rows;
  int64_t depth;

  RowBlock(uint16_t const* a, int64_t num_rows, int64_t k_depth)
      : values(static_cast<size_t>(num_rows * k_depth)), rows(num_rows), depth(k_depth) {
    for (int64_t i = 0; i < num_rows * k_depth; ++i) values[i] = to_float(a[i]);
  }
};

// sums[rows][kPanel] = A * B^T for kPanel rows of B ([kPanel pointers][depth], null: zeros).
void multiply_panel(RowBlock const& a, uint16_t const* const* b_rows, float* sums);

}  // namespace xstage::cpu
