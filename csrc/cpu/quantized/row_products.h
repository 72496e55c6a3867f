// The products of integer_products.h of rows of int8 with one scale each, with the very sums.
#pragma once

#include "cpu/quantized/strips.h"

#if defined(QUIRE_WIDE)

namespace quire {
namespace QUIRE_ISA {
namespace {

// Rows of int8 with one scale each: a register of kStepRows rows at a time.
template <class T, class Out>
class RowProducts {
  static constexpr int kTokens = kRowTokens, kBytes = QUIRE_WIDE;

 public:
  using Stored = uint8_t;
  using Flushed = float;
  static constexpr int kBlockRows = kStepRows;
  static constexpr bool kLongBlocks = true;
  static constexpr int64_t kTurnGrain = 4;
  using Block = LinearBlock<T, Out, uint8_t>;

  explicit RowProducts(const LinearArgs& args) : args_(args), x_(args) {}

  static int64_t tall_rows() { return 0; }
  int64_t row_bytes() const { return mean_row_bytes(args_); }
  int64_t tiles() const { return args_.tokens; }
  void turn(int64_t begin, int64_t end) const {
    for (int64_t token = begin; token < end; ++token) x_.template quantize_token<T>(token);
  }
  int64_t parts() const { return 1; }
  int64_t first_of(int64_t part) const { return part * args_.tokens; }

  void run(const Block& block, const Block* next) const {
    const int64_t row_bytes = args_.formats[block.weight].row_bytes, strip = kStepRows * row_bytes;
    const uint8_t* end = block.w + block.rows * row_bytes;
    const int64_t tiles = (args_.tokens + kTokens - 1) / kTokens;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t first = args_.tokens * t / tiles, count = args_.tokens * (t + 1) / tiles - first;
      for (int64_t row = 0; row < block.rows; row += kStepRows) {
        const uint8_t* w = block.w + row * row_bytes;
        const int rows = static_cast<int>(block.rows - row < kStepRows ? block.rows - row : kStepRows);
        const StepResult<T, Out> result{block.bias ? block.bias + row : nullptr, block.y + first * block.y_stride + row,
                                        block.y_stride, rows};
        const uint8_t* ahead = w + strip < end ? w + strip : next ? next->w : w;
        multiply_some(count, StepRows(w, row_bytes, rows), first, ahead, result);
      }
    }
  }

 private:
  template <int kCount = kTokens>
  void multiply_some(int64_t count, const StepRows& rows, int64_t first, const uint8_t* ahead,
                     const StepResult<T, Out>& result) const {
    if (count == kCount) return multiply<kCount>(rows, first, ahead, result);
    if constexpr (kCount > 1) multiply_some<kCount - 1>(count, rows, first, ahead, result);
  }

  template <int kCount>
  void multiply(const StepRows& rows, int64_t first, const uint8_t* ahead, const StepResult<T, Out>& result) const {
    RowTokens::Token x[kCount];
    WideInts sums[kCount][kStepRows];
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      x[i] = x_[first + i];
#pragma GCC unroll 4
      for (int r = 0; r < kStepRows; ++r) sums[i][r] = WideInts{};
    }
    for (int64_t k = 0; k < args_.features; k += kBytes) {
      WideInts w[kStepRows];
#pragma GCC unroll 4
      for (int r = 0; r < kStepRows; ++r) {
        if constexpr (kCount == 1) __builtin_prefetch(ahead + r * kBytes, 0, 3);
        w[r] = row_bytes_at(rows.rows[r] + 4 + k, args_.features - k);
      }
      ahead += kStepRows * kBytes;
#pragma GCC unroll 8
      for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 4
        for (int r = 0; r < kStepRows; ++r) sums[i][r] = add_row(sums[i][r], w[r], x[i].codes + k);
      }
    }
    const __m128 scale = _mm_setr_ps(read<float>(rows.rows[0]), read<float>(rows.rows[1]), read<float>(rows.rows[2]),
                                     read<float>(rows.rows[3]));
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      const __m128i total = _mm_sub_epi32(totals_of_rows(sums[i]), _mm_set1_epi32(kRowOffset * x[i].sum));
      result.put(i, vec_of(_mm_mul_ps(_mm_cvtepi32_ps(total), _mm_mul_ps(scale, _mm_set1_ps(x[i].scale)))));
    }
  }

  const LinearArgs& args_;
  const RowTokens x_;
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

#endif
