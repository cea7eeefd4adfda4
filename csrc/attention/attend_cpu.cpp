#include "attend_cpu.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <limits>

namespace xstage::cpu {
namespace {

// The three hot loops. They are written so that the compiler vectorises over the last index
// without reordering any sum, and built for AVX2 as well as for the baseline.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define XS_MULTIVERSION __attribute__((target_clones("arch=haswell", "default")))
#else
#define XS_MULTIVERSION
#endif

// scores[j] = sum_d q[d] keys[d][j]
XS_MULTIVERSION void multiply_query(float const* q, float const* keys, int64_t head_dim,
                                    int64_t width, int64_t num_keys, float* scores) {
  std::fill(scores, scores + num_keys, 0.0f);
  for (int64_t d = 0; d < head_dim; ++d) {
    float const factor = q[d];
    float const* const row = keys + d * width;
    for (int64_t j = 0; j < num_keys; ++j) scores[j] += factor * row[j];
  }
}

// out[d] += sum_j weights[j] values[j][d]
XS_MULTIVERSION void add_values(float const* weights, float const* values, int64_t head_dim,
                                int64_t num_keys, float* out) {
  for (int64_t j = 0; j < num_keys; ++j) {
    float const factor = weights[j];
    float const* const row = values + j * head_dim;
    for (int64_t d = 0; d < head_dim; ++d) out[d] += factor * row[d];
  }
}

XS_MULTIVERSION void scale_row(float* row, int64_t count, float factor) {
  for (int64_t d = 0; d < count; ++d) row[d] *= factor;
}

// One tile: its rows' running maxima, sums and outputs, and the keys of the current step.
template <class Element>
class TileWorker {
 public:
  TileWorker(AttentionProblem const& problem, AttendArguments const& arguments, int64_t block_m,
             int64_t block_n)
      : problem_(problem),
        arguments_(arguments),
        block_n_(block_n),
        query_(block_m * problem.head_dim),
        out_(block_m * problem.head_dim),
        maximum_(block_m),
        sum_(block_m),
        keys_(problem.head_dim * block_n),
        values_(block_n * problem.head_dim),
        scores_(block_n),
        key_index_(block_n) {}

  void run(QueryTile const& tile) {
    load_query(tile);
    int32_t const end = key_end_of(tile.row + tile.num_rows - 1);
    for (int32_t begin = 0; begin < end; begin += static_cast<int32_t>(block_n_)) {
      int32_t const stop = std::min<int32_t>(end, begin + static_cast<int32_t>(block_n_));
      if (classify_keys(segments(tile), num_segments(), begin, stop) == KeyBlock::kNone) continue;
      load_keys(tile, begin, stop);
      for (int32_t row = 0; row < tile.num_rows; ++row) step(tile, row);
    }
    store(tile);
  }

 private:
  int32_t num_segments() const { return static_cast<int32_t>(problem_.num_segments); }
  int32_t const* segments(QueryTile const& tile) const {
    return arguments_.segments == nullptr
               ? nullptr
               : arguments_.segments + 2 * tile.batch * problem_.num_segments;
  }
  int32_t key_end_of(int32_t row) const {
    return key_end(row, static_cast<int32_t>(problem_.num_query_rows),
                   static_cast<int32_t>(problem_.num_keys), problem_.causal);
  }

  void load_query(QueryTile const& tile) {
    OperandStrides const& stride = problem_.q;
    auto const* const base = static_cast<Element const*>(arguments_.q) + tile.batch * stride.batch +
                             tile.head * stride.head;
    for (int64_t row = 0; row < tile.num_rows; ++row) {
      Element const* const source = base + (tile.row + row) * stride.row;
      for (int64_t d = 0; d < problem_.head_dim; ++d) {
        query_[row * problem_.head_dim + d] = static_cast<float>(source[d]) * problem_.scale;
      }
    }
    std::fill(out_.begin(), out_.end(), 0.0f);
    std::fill(sum_.begin(), sum_.end(), 0.0f);
    std::fill(maximum_.begin(), maximum_.end(), -std::numeric_limits<float>::infinity());
  }

  // Only valid keys are ever read: what padding holds, NaN included, cannot reach a result.
  void load_keys(QueryTile const& tile, int32_t begin, int32_t stop) {
    int64_t const kv_head = (tile.head + problem_.head_phase) / problem_.kv_group;
    auto const* const k = static_cast<Element const*>(arguments_.k) +
                          tile.batch * problem_.k.batch + kv_head * problem_.k.head;
    auto const* const v = static_cast<Element const*>(arguments_.v) +
                          tile.batch * problem_.v.batch + kv_head * problem_.v.head;
    num_keys_ = 0;
    for (int32_t key = begin; key < stop; ++key) {
      if (!key_is_valid(segments(tile), num_segments(), key)) continue;
      for (int64_t d = 0; d < problem_.head_dim; ++d) {
        keys_[d * block_n_ + num_keys_] = static_cast<float>(k[key * problem_.k.row + d]);
        values_[num_keys_ * problem_.head_dim + d] =
            static_cast<float>(v[key * problem_.v.row + d]);
      }
      key_index_[num_keys_++] = key;
    }
  }

  void step(QueryTile const& tile, int32_t row) {
    int32_t const limit = key_end_of(tile.row + row);
    auto const first = key_index_.begin();
    int64_t const visible = std::lower_bound(first, first + num_keys_, limit) - first;
    if (visible == 0) return;
    float* const out = &out_[row * problem_.head_dim];
    multiply_query(&query_[row * problem_.head_dim], keys_.data(), problem_.head_dim, block_n_,
                   visible, scores_.data());
    float const highest = *std::max_element(scores_.begin(), scores_.begin() + visible);
    float const maximum = std::max(maximum_[row], highest);
    float const correction = std::exp(maximum_[row] - maximum);
    float sum = 0;
    for (int64_t j = 0; j < visible; ++j) sum += scores_[j] = std::exp(scores_[j] - maximum);
    if (correction != 1.0f) scale_row(out, problem_.head_dim, correction);
    sum_[row] = sum_[row] * correction + sum;
    maximum_[row] = maximum;
    add_values(scores_.data(), values_.data(), problem_.head_dim, visible, out);
  }

  // A row without any key is zero, with a log-sum-exp of minus infinity.
  void store(QueryTile const& tile) {
    OutputTarget const& target = arguments_.out;
    auto* const base = static_cast<Element*>(target.base[tile.owner]);
    for (int32_t row = 0; row < tile.num_rows; ++row) {
      float const factor = sum_[row] == 0.0f ? 0.0f : 1.0f / sum_[row];
      Element* const out =
          base + bshd_offset(tile.batch, tile.owner_row + row, target.first_head + tile.head,
                             target.rows.count(tile.owner), target.total_heads, problem_.head_dim);
      for (int64_t d = 0; d < problem_.head_dim; ++d) {
        out[d] = static_cast<Element>(out_[row * problem_.head_dim + d] * factor);
      }
      if (arguments_.lse == nullptr) continue;
      int64_t const line = tile.batch * problem_.num_heads + tile.head;
      arguments_.lse[line * problem_.num_query_rows + tile.row + row] =
          maximum_[row] + std::log(sum_[row]);
    }
  }

  AttentionProblem const& problem_;
  AttendArguments const& arguments_;
  int64_t block_n_;
  std::vector<float> query_;    // (BLK_M,D), scaled
  std::vector<float> out_;      // (BLK_M,D)
  std::vector<float> maximum_;  // (BLK_M)
  std::vector<float> sum_;      // (BLK_M)
  std::vector<float> keys_;     // (D,BLK_N)
  std::vector<float> values_;   // (BLK_N,D)
  std::vector<float> scores_;   // (BLK_N)
  std::vector<int32_t> key_index_;
  int64_t num_keys_ = 0;
};

template <class Element>
void attend_as(AttentionProblem const& problem, TileSchedule const& schedule,
               AttendArguments const& arguments) {
  torch::stable::parallel_for(0, schedule.size(), 1, [&](int64_t begin, int64_t end) {
    TileWorker<Element> worker(problem, arguments, schedule.block_m, kDefaultBlockN);
    for (int64_t index = begin; index < end; ++index) worker.run(schedule.tile(index));
  });
}

}  // namespace

void attend(AttentionProblem const& problem, TileSchedule const& schedule,
            AttendArguments const& arguments) {
  if (problem.dtype == ScalarType::BFloat16) {
    attend_as<torch::headeronly::BFloat16>(problem, schedule, arguments);
  } else if (problem.dtype == ScalarType::Half) {
    attend_as<torch::headeronly::Half>(problem, schedule, arguments);
  } else {
    attend_as<float>(problem, schedule, arguments);
  }
}

}  // namespace xstage::cpu
