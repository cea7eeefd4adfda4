// Online softmax on fragments of scores, as in FlashAttention-3: base 2 with the scale folded into
// one multiply-add, one running maximum and one running sum for each of a thread's two rows.
//
//   p = exp2(s * scale_log2 - max * scale_log2),   scale_log2 = scale * log2(e)
//
// Sums stay per thread until the end of the tile; maxima are shared by the four threads of a row.
#pragma once

#include <cute/tensor.hpp>

namespace xstage {

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Over the four threads that share a row of a fragment.
template <class Combine>
__device__ __forceinline__ float combine_quad(float x, Combine combine) {
  x = combine(x, __shfl_xor_sync(0xffffffff, x, 2));
  return combine(x, __shfl_xor_sync(0xffffffff, x, 1));
}

class OnlineSoftmax {
 public:
  __device__ __forceinline__ explicit OnlineSoftmax(float scale_log2) : scale_log2_(scale_log2) {}

  // Turns scores into probabilities in place. Returns by what the output so far must be multiplied.
  // kFirst: there is no output yet. A row may have seen no key at all so far (maximum -inf): it
  // counts from zero then, since -inf minus -inf is not a number.
  template <bool kFirst, class Fragment>
  __device__ __forceinline__ void step(Fragment& scores, float (&rescale)[2]) {
    constexpr int kSize = decltype(cute::size(scores))::value;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Two chains of maxima per row: one alone is bound by latency.
      float even = scores(2 * r), odd = scores(2 * r + 1);
#pragma unroll
      for (int e = 4; e < kSize; e += 4) {
        even = fmaxf(even, scores(e + 2 * r));
        odd = fmaxf(odd, scores(e + 2 * r + 1));
      }
      float block_max = combine_quad(fmaxf(even, odd), [](float a, float b) { return fmaxf(a, b); });
      if constexpr (!kFirst) block_max = fmaxf(block_max, max_[r]);
      float const offset = block_max == -INFINITY ? 0.0f : block_max * scale_log2_;
      if constexpr (!kFirst) {
        rescale[r] = exp2_approx(max_[r] * scale_log2_ - offset);
        sum_[r] *= rescale[r];
      } else {
        sum_[r] = 0.0f;
      }
      max_[r] = block_max;
      offset_[r] = offset;
    }
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      scores(e) = exp2_approx(scores(e) * scale_log2_ - offset_[e / 2 % 2]);
    }
#pragma unroll
    for (int e = 0; e < kSize; ++e) sum_[e / 2 % 2] += scores(e);
  }

  // After the last block: 1 / sum of each row (0 for a row without keys) and the natural logarithm
  // of the sum of exp(scale * score).
  __device__ __forceinline__ void finish(float (&inverse)[2], float (&lse)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float const sum = combine_quad(sum_[r], [](float a, float b) { return a + b; });
      inverse[r] = sum == 0.0f ? 0.0f : 1.0f / sum;
      lse[r] = sum == 0.0f ? -INFINITY : offset_[r] * 0.69314718f + __logf(sum);
    }
  }

 private:
  float scale_log2_;
  float max_[2];
  float offset_[2];
  float sum_[2];
};

}  // namespace xstage
