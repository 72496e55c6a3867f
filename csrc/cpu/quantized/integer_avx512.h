// The products of integer_products.h by AVX-512's vpdpbusd, with the very sums.
//
// kStepRows rows of a weight go with up to kStepTokens tokens at a time: a step's columns are made ready in registers on
// their way from memory. More tokens are the business of panels_avx512.h.
#pragma once

#if defined(__AVX512VNNI__)

#include "cpu/linear/linear_cut.h"
#include "cpu/quantized/tokens_avx512.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

inline __m512i broadcast4(const int* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)); }
inline __m512 broadcast4(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }

// Lane 4 * r + i: the sum of the lanes i, i + 4, i + 8, i + 12 of row r.
inline __m512i reduce_rows(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xee));
  const __m512i cd = _mm512_add_epi32(_mm512_shuffle_i32x4(c, d, 0x44), _mm512_shuffle_i32x4(c, d, 0xee));
  return _mm512_add_epi32(_mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xdd));
}

// Of each four lanes (0 + 1) + (2 + 3), in the first four lanes.
inline Vec add_chains(__m512 a) {
  a = _mm512_add_ps(a, _mm512_permute_ps(a, 0xb1));
  a = _mm512_add_ps(a, _mm512_permute_ps(a, 0x4e));
  return {_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12), a)};
}

template <int kOffset>
inline __m512i times_offset(__m512i sums) {
  static_assert(kOffset == 0 || kOffset == 12 || (kOffset & (kOffset - 1)) == 0, "others need a multiplication");
  if constexpr (kOffset == 12) return _mm512_add_epi32(_mm512_slli_epi32(sums, 3), _mm512_slli_epi32(sums, 2));
  return _mm512_slli_epi32(sums, __builtin_ctz(kOffset | 1 << 30));
}

// A token's share of a step, by one of its codes: acc's lanes are the chains of all rows.
template <class Kind>
inline __attribute__((always_inline)) __m512 add_codes(__m512 acc, const Step<Kind::kHalves>& step,
                                                       const StepCodes& x) {
  constexpr int kOffset = Steps<Kind>::kOffset;
  const __m512i first = _mm512_load_si512(x.codes[0]), second = _mm512_load_si512(x.codes[1]);
  const __m512 scale = broadcast4(x.scales);
  __m512i sums[kStepRows], total;
  if constexpr (Kind::kHalves) {
    const __m512i of_first = broadcast4(x.first_sums);
    const __m512i of_second = _mm512_sub_epi32(broadcast4(x.sums), of_first);
    const __m512i zero = _mm512_setzero_si512();
    // Taken off once, in four of the lanes that are added up.
    const __m512i off[2] = {_mm512_mask_sub_epi32(zero, 15, zero, times_offset<kOffset>(of_first)),
                            _mm512_mask_sub_epi32(zero, 15, zero, times_offset<kOffset>(of_second))};
#pragma GCC unroll 4
    for (int r = 0; r < kStepRows; ++r) {
      const __m512i a = _mm512_dpbusd_epi32(kOffset ? off[0] : zero, step.codes[r][0], first);
      const __m512i b = _mm512_dpbusd_epi32(kOffset ? off[1] : zero, step.codes[r][1], second);
      sums[r] = _mm512_add_epi32(_mm512_mullo_epi32(a, step.factors[r][0]), _mm512_mullo_epi32(b, step.factors[r][1]));
    }
    total = reduce_rows(sums[0], sums[1], sums[2], sums[3]);
    acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), _mm512_mul_ps(step.scale, scale), acc);
    if constexpr (Kind::kMinimum) {
      const __m512i low =
          _mm512_add_epi32(_mm512_mullo_epi32(of_first, step.low[0]), _mm512_mullo_epi32(of_second, step.low[1]));
      acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(low), _mm512_mul_ps(step.minimum, scale), acc);
    }
    return acc;
  } else {
#pragma GCC unroll 4
    for (int r = 0; r < kStepRows; ++r)
      sums[r] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), step.codes[r][0], first),
                                    step.codes[r][1], second);
    total = reduce_rows(sums[0], sums[1], sums[2], sums[3]);
    if constexpr (kOffset > 0) total = _mm512_sub_epi32(total, times_offset<kOffset>(broadcast4(x.sums)));
    acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), _mm512_mul_ps(step.scale, scale), acc);
    if constexpr (Kind::kMinimum) acc = _mm512_fmadd_ps(step.minimum, broadcast4(x.scaled_sums), acc);
    return acc;
  }
}

template <class Kind>
inline __attribute__((always_inline)) __m512 add_step(__m512 acc, const Step<Kind::kHalves>& step, const StepToken& x) {
  acc = add_codes<Kind>(acc, step, x.own);
  if (__builtin_expect(x.groups_with_rest, 0)) {
    const auto lanes = static_cast<__mmask16>(x.groups_with_rest * 0x1111);
    acc = _mm512_mask_mov_ps(acc, lanes, add_codes<Kind>(acc, step, x.rest));
  }
  return acc;
}

template <class T, class Out>
struct StepResult {
  const T* bias;
  Out* y;
  int64_t y_stride;
  int rows;

  void put(int64_t token, Vec total) const {
    if (bias) total = add(total, load_first(bias, rows));
    store_first(y + token * y_stride, total, rows);
  }
};

// The addresses of kStepRows rows; past the last, the last again.
struct StepRows {
  const uint8_t* rows[kStepRows];
  explicit StepRows(const uint8_t* const* own) : rows{own[0], own[1], own[2], own[3]} {}
  StepRows(const uint8_t* first, int64_t row_bytes, int count) {
    for (int r = 0; r < kStepRows; ++r) rows[r] = first + (r < count ? r : count - 1) * row_bytes;
  }
};

// A weight's steps, one by one.
template <class Kind>
class StepReader {
 public:
  static constexpr bool kLarge = Kind::kColumns > kStep;
  static constexpr int kStepBytes = kLarge ? Kind::kBytes / 2 : kStep / Kind::kColumns * Kind::kBytes;

  StepReader(const StepRows& rows, int64_t features) : rows_(rows), whole_(features / kStep), features_(features) {}

  inline __attribute__((always_inline)) void take(int64_t number, Step<Kind::kHalves>* to) const {
    const int64_t offset = kLarge ? number / 2 * Kind::kBytes : number * kStepBytes;
    const uint8_t* at[kStepRows];
    if (number < whole_) {
      for (int r = 0; r < kStepRows; ++r) at[r] = rows_.rows[r] + offset;
      return Steps<Kind>::take(at, number % 2, to);
    }
    uint8_t rest[kStepRows][kStepBytes + 64] = {};
    for (int r = 0; r < kStepRows; ++r) {
      __builtin_memcpy(rest[r], rows_.rows[r] + offset, (features_ - number * kStep) / Kind::kColumns * Kind::kBytes);
      at[r] = rest[r];
    }
    Steps<Kind>::take(at, number % 2, to);
  }

 private:
  const StepRows& rows_;
  const int64_t whole_, features_;
};

constexpr int kStepTokens = 4;

// The chains of kStepRows rows with some tokens.
template <class Kind, int kCount>
void multiply_steps(const StepReader<Kind>& reader, const GroupTokens& tokens, const uint8_t* ahead, __m512* chains) {
  constexpr int kAhead = kStepRows * StepReader<Kind>::kStepBytes;
  GroupTokens::Token x[kCount];
  __m512 acc[kCount];
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) x[i] = tokens[i], acc[i] = _mm512_setzero_ps();
  const int64_t steps = tokens.steps();
  for (int64_t number = 0; number < steps; ++number) {
#pragma GCC unroll 16
    for (int line = 0; line < kAhead; line += 64) __builtin_prefetch(ahead + line, 0, 3);
    ahead += kAhead;
    Step<Kind::kHalves> step;
    reader.take(number, &step);
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) acc[i] = add_step<Kind>(acc[i], step, x[i][number]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) chains[i] = acc[i];
}

template <class Kind, int kCount = kStepTokens>
inline void multiply_some_steps(int64_t count, const StepReader<Kind>& reader, const GroupTokens& tokens,
                                const uint8_t* ahead, __m512* chains) {
  if (count == kCount) return multiply_steps<Kind, kCount>(reader, tokens, ahead, chains);
  if constexpr (kCount > 1) multiply_some_steps<Kind, kCount - 1>(count, reader, tokens, ahead, chains);
}

// A few tokens with kStepRows rows, the first at w.
inline void multiply_strip(RowKind kind, const StepRows& rows, int64_t features, const GroupTokens& tokens,
                           int64_t count, const uint8_t* ahead, __m512* chains) {
  for_kind(kind, [&](auto own) {
    multiply_some_steps(count, StepReader<decltype(own)>(rows, features), tokens, ahead, chains);
  });
}

template <class T, class Out>
class GroupProducts {
 public:
  using Stored = uint8_t;
  using Flushed = float;
  static constexpr int kBlockRows = kStepRows;
  static constexpr bool kLongBlocks = true;
  static constexpr int64_t kTurnGrain = 4;
  using Block = LinearBlock<T, Out, uint8_t>;

  explicit GroupProducts(const LinearArgs& args) : args_(args), x_(args) {}

  int64_t row_bytes() const { return mean_row_bytes(args_); }
  int64_t tiles() const { return args_.tokens; }
  void turn(int64_t begin, int64_t end) const {
    for (int64_t token = begin; token < end; ++token) x_.template quantize_token<T>(token);
  }
  int64_t parts() const { return 1; }
  int64_t first_of(int64_t part) const { return part * args_.tokens; }

  void run(const Block& block, const Block* next) const {
    const RowKind kind = args_.formats[block.weight].kind;
    const int64_t row_bytes = args_.formats[block.weight].row_bytes;
    const int64_t strips = (block.rows + kStepRows - 1) / kStepRows, strip_bytes = kStepRows * row_bytes;
    const auto rows = [&](int64_t s) { return StepRows(block.w + s * strip_bytes, row_bytes, count_of(block, s)); };
    const auto put = [&](int64_t s, int64_t token, __m512 chains) {
      const int64_t row = s * kStepRows;
      const StepResult<T, Out> result{block.bias ? block.bias + row : nullptr, block.y + row, block.y_stride,
                                      count_of(block, s)};
      result.put(token, add_chains(chains));
    };
    for (int64_t s = 0; s < strips; ++s) {
      const uint8_t* w = block.w + s * strip_bytes;
      const uint8_t* ahead = s + 1 < strips ? w + strip_bytes : next ? next->w : w;
      __m512 chains[kStepTokens];
      multiply_strip(kind, rows(s), args_.features, x_, args_.tokens, ahead, chains);
      for (int64_t i = 0; i < args_.tokens; ++i) put(s, i, chains[i]);
    }
  }

 private:
  static int count_of(const Block& block, int64_t strip) {
    const int64_t left = block.rows - strip * kStepRows;
    return static_cast<int>(left < kStepRows ? left : kStepRows);
  }

  const LinearArgs& args_;
  const GroupTokens x_;
};

// Rows of int8 with one scale each: 64 columns of kStepRows rows at a time.
template <class T, class Out>
class RowProducts {
  static constexpr int kTokens = 6, kBytes = 64;

 public:
  using Stored = uint8_t;
  using Flushed = float;
  static constexpr int kBlockRows = kStepRows;
  static constexpr bool kLongBlocks = true;
  static constexpr int64_t kTurnGrain = 4;
  using Block = LinearBlock<T, Out, uint8_t>;

  explicit RowProducts(const LinearArgs& args) : args_(args), x_(args) {}

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
    __m512i sums[kCount][kStepRows];
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      x[i] = x_[first + i];
#pragma GCC unroll 4
      for (int r = 0; r < kStepRows; ++r) sums[i][r] = _mm512_setzero_si512();
    }
    for (int64_t k = 0; k < args_.features; k += kBytes) {
      const int64_t left = args_.features - k;
      const __mmask64 there = left < kBytes ? (uint64_t{1} << left) - 1 : ~uint64_t{0};
      __m512i w[kStepRows];
#pragma GCC unroll 4
      for (int r = 0; r < kStepRows; ++r) {
        if constexpr (kCount == 1) __builtin_prefetch(ahead + r * kBytes, 0, 3);
        w[r] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(there, rows.rows[r] + 4 + k), bytes(128));
      }
      ahead += kStepRows * kBytes;
#pragma GCC unroll 8
      for (int i = 0; i < kCount; ++i) {
        const __m512i own = _mm512_load_si512(x[i].codes + k);
#pragma GCC unroll 4
        for (int r = 0; r < kStepRows; ++r) sums[i][r] = _mm512_dpbusd_epi32(sums[i][r], w[r], own);
      }
    }
    Vec scale{_mm512_castps128_ps512(_mm_setr_ps(read<float>(rows.rows[0]), read<float>(rows.rows[1]),
                                                 read<float>(rows.rows[2]), read<float>(rows.rows[3])))};
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      __m512i total = reduce_rows(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
      total = _mm512_add_epi32(total, _mm512_shuffle_epi32(total, static_cast<_MM_PERM_ENUM>(0xb1)));
      total = _mm512_add_epi32(total, _mm512_shuffle_epi32(total, static_cast<_MM_PERM_ENUM>(0x4e)));
      total = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12), total);
      total = _mm512_sub_epi32(total, _mm512_set1_epi32(128 * x[i].sum));
      result.put(i, mul({_mm512_cvtepi32_ps(total)}, mul(scale, set1(x[i].scale))));
    }
  }

  const LinearArgs& args_;
  const RowTokens x_;
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

#endif
