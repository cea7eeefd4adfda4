#include "gemm_cpu.h"

namespace xstage::cpu {
namespace {

constexpr int64_t kRows = 4;  // rows that share one pass over the panel

// Wider registers where the processor has them. The order of the sums is the same in all clones.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define XS_CLONES __attribute__((target_clones("arch=haswell", "default")))
#else
#define XS_CLONES
#endif

XS_CLONES void multiply_rows(float const* a, int64_t depth, int64_t num_rows, float const* panel,
                             float* sums) {
  float acc[kRows][kPanel] = {};
  if (num_rows == kRows) {
    for (int64_t k = 0; k < depth; ++k) {
      float const* const b = panel + k * kPanel;
      for (int64_t r = 0; r < kRows; ++r) {
        float const value = a[r * depth + k];
#pragma omp simd
        for (int64_t c = 0; c < kPanel; ++c) acc[r][c] += value * b[c];
      }
    }
  } else {
    for (int64_t r = 0; r < num_rows; ++r) {
      for (int64_t k = 0; k < depth; ++k) {
        float const value = a[r * depth + k];
        float const* const b = panel + k * kPanel;
#pragma omp simd
        for (int64_t c = 0; c < kPanel; ++c) acc[r][c] += value * b[c];
      }
    }
  }
  std::memcpy(sums, acc, static_cast<size_t>(num_rows) * kPanel * sizeof(float));
}

}  // namespace

void multiply_panel(RowBlock const& a, uint16_t const* const* b_rows, float* sums) {
  // [depth][kPanel]: one column of the panel per row of B, so that the inner loop runs over
  // columns.
  std::vector<float> panel(static_cast<size_t>(a.depth * kPanel));
  for (int64_t c = 0; c < kPanel; ++c) {
    if (b_rows[c] == nullptr) continue;
    for (int64_t k = 0; k < a.depth; ++k) panel[k * kPanel + c] = to_float(b_rows[c][k]);
  }
  for (int64_t row = 0; row < a.rows; row += kRows) {
    int64_t const num_rows = a.rows - row < kRows ? a.rows - row : kRows;
    multiply_rows(a.values.data() + row * a.depth, a.depth, num_rows, panel.data(),
                  sums + row * kPanel);
  }
}

}  // namespace xstage::cpu
