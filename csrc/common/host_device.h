// Markers for code that runs on the host and on the device alike.
//
// layout.h and schedule.h of every operator are plain C++ behind these macros, so that the kernel,
// the CPU path, the simulator and the tests run the same code.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define XS_HD __host__ __device__ __forceinline__
#else
#define XS_HD inline
#endif

namespace xstage {

template <class T>
XS_HD constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <class T>
XS_HD constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

template <class T>
XS_HD constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}

template <class T>
XS_HD constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}

}  // namespace xstage
