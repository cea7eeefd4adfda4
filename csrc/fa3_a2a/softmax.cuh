// Online softmax on fragments of scores, base 2, with the scale folded into one multiply-add:
//
//   p = exp2(s * scale_log2 - offset),   scale_log2 = scale * log2(e)
//
// offset is a reference for the row, at or below its true maximum so far by a bounded factor: it is
// raised only when a score exceeds it by more than kSlack. The final division by the sum makes any
// reference exact, so a row pays for a new maximum (a reduction over its four threads, a rescaled
// output) only in the first few blocks, and exponentials need not wait for a maximum.
//
// A block is taken in two parts: while the exponentials of the first run on the special-function
// unit, the maxima of the second run beside them. Or it is taken at once, where other warpgroups
// have exponentials enough for that unit: then a second question costs more than it hides. Sums stay
// per thread until the end of the tile.
#pragma once

#include <cute/tensor.hpp>

#include "common/math.cuh"

namespace xstage {

// Over the four threads that share a row of a fragment.
template <class Combine>
__device__ __forceinline__ float combine_quad(float x, Combine combine) {
  x = combine(x, __shfl_xor_sync(0xffffffff, x, 2));
  return combine(x, __shfl_xor_sync(0xffffffff, x, 1));
}

// kColumns: of a block of scores; a thread holds kColumns / 2 of them in two rows (masks.cuh).
template <int kColumns, bool kAtOnce>
class OnlineSoftmax {
 public:
  static constexpr int kSize = kColumns / 2;

  __device__ __forceinline__ explicit OnlineSoftmax(float scale_log2)
      : scale_log2_(scale_log2), slack_(kSlack / scale_log2) {}

  // Elements of a thread whose exponentials come first: those of the first part, more than half.
  static constexpr int kEarly = kSize / 16 * 8 + 8;

  // Turns scores into probabilities in place. `rescale`: by what the output so far must be
  // multiplied. Returns false in the whole warp when that is one. `behind_maxima` is called beside
  // the last exponentials, when elements [0, kEarly) are final.
  template <class Scores, class BehindMaxima>
  __device__ __forceinline__ bool step(Scores& scores, float (&rescale)[2],
                                       BehindMaxima behind_maxima) {
    constexpr int kAsked = kAtOnce ? kSize : kEarly;
    float top[2];
    find_top<0, kAsked>(scores, top);
    bool raised = raise_if_needed<0>(scores, top, rescale, false);
    if constexpr (!kAtOnce) find_top<kAsked, kSize>(scores, top);
    exponentiate<0, kEarly>(scores);
    if constexpr (!kAtOnce) raised |= raise_if_needed<kAsked>(scores, top, rescale, raised);
    behind_maxima();
    exponentiate<kEarly, kSize>(scores);
    return raised;
  }

  // After the last block: 1 / sum of each row (0 for a row without keys) and the natural logarithm
  // of the sum of exp(scale * score).
  __device__ __forceinline__ void finish(float (&inverse)[2], float (&lse)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float const sum =
          combine_quad(sum_[r][0] + sum_[r][1], [](float a, float b) { return a + b; });
      bool const empty = ceiling_[r] == -INFINITY;
      inverse[r] = empty ? 0.0f : 1.0f / sum;
      lse[r] = empty ? -INFINITY : offset_[r] * 0.69314718f + __logf(sum);
    }
  }

 private:
  // Probabilities stay below 2^kSlack: far from the end of float16, whose rounding (like that of
  // bfloat16) is relative.
  static constexpr float kSlack = 8.0f;
  // Maximum over a thread's elements [kBegin, kEnd) of each row, as two chains of half the length.
  template <int kBegin, int kEnd, class Scores>
  __device__ __forceinline__ void find_top(Scores const& scores, float (&top)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float even = scores(kBegin + 2 * r), odd = scores(kBegin + 2 * r + 1);
#pragma unroll
      for (int e = kBegin + 4; e < kEnd; e += 4) {
        even = max_nan(even, scores(e + 2 * r));
        odd = max_nan(odd, scores(e + 2 * r + 1));
      }
      top[r] = max_nan(even, odd);
    }
  }

  template <int kBegin, int kEnd, class Scores>
  __device__ __forceinline__ void exponentiate(Scores& scores) {
#pragma unroll
    for (int e = kBegin; e < kEnd; ++e) {
      scores(e) = exp2_approx(scores(e) * scale_log2_ - offset_[e / 2 % 2]);
      sum_[e / 2 % 2][e % 2] += scores(e);
    }
  }

  // Raises the references of the warp's rows when some score of the next part is too far above
  // one, or is not a number (which then reaches the whole row). Elements [0, kDone) are
  // probabilities already and follow. A row that has seen no key has a ceiling of -inf and an
  // offset of zero, since -inf minus -inf is not a number.
  template <int kDone, class Scores>
  __device__ __forceinline__ bool raise_if_needed(Scores& scores, float const (&top)[2],
                                                  float (&rescale)[2], bool raised) {
    bool const below = top[0] <= ceiling_[0] && top[1] <= ceiling_[1];
    if (__builtin_expect(__all_sync(0xffffffff, below), 1)) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float const row_top = combine_quad(top[r], max_nan);
      // A row follows its own scores alone, so that results do not depend on which rows share a
      // warp. Selects only: with a branch here the compiler takes the whole loop for divergent.
      bool const empty = ceiling_[r] == -INFINITY;
      bool const higher = !(row_top <= ceiling_[r]);
      float const offset = higher ? row_top * scale_log2_ : offset_[r];
      float const factor = empty ? 0.0f : exp2_approx(offset_[r] - offset);
      offset_[r] = offset;
      ceiling_[r] = higher ? row_top + slack_ : ceiling_[r];
      rescale[r] = raised ? rescale[r] * factor : factor;
      sum_[r][0] *= factor;
      sum_[r][1] *= factor;
#pragma unroll
      for (int e = 0; e < kDone; e += 4) {
        scores(e + 2 * r) *= factor;
        scores(e + 2 * r + 1) *= factor;
      }
    }
    return true;
  }

  float scale_log2_;
  float slack_;  // kSlack in units of scores
  float offset_[2] = {0.0f, 0.0f};
  float ceiling_[2] = {-INFINITY, -INFINITY};
  float sum_[2][2] = {};
};

}  // namespace xstage
