// The products of integer_products.h for a few tokens, with the very sums.
//
// kStepRows rows of a weight go with up to kStepTokens tokens at a time: a step's columns are made ready in registers on
// their way from memory. More tokens are the business of panels.h.
#pragma once

#include "cpu/linear/linear_cut.h"
#include "cpu/quantized/integer_avx2.h"
#include "cpu/quantized/integer_avx512.h"

#if defined(QUIRE_WIDE)

namespace quire {
namespace QUIRE_ISA {
namespace {

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

// How far ahead of the products rows are fetched, into the second cache: rows are multiplied faster than memory gives them,
// and as many lines as that cache waits for at a time, and no fewer, keep it busy.
constexpr int64_t kBytesAhead = 8 << 10;

// The chains of kStepRows rows with a token, and those of its second codes, where it has any.
struct StripChains {
  Chains own, rest;
  bool has_rest;

  Vec total() const { return has_rest ? add(add_chains(own), add_chains(rest)) : add_chains(own); }
};

// The chains of kStepRows rows with some tokens.
template <class Kind, int kCount>
void multiply_steps(const StepReader<Kind>& reader, const GroupTokens& tokens, const uint8_t* ahead,
                    StripChains* chains) {
  constexpr int kAhead = kStepRows * StepReader<Kind>::kStepBytes;
  Chains acc[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
    acc[i] = Chains{};
    chains[i].rest = Chains{}, chains[i].has_rest = false;
  }
  const int64_t steps = tokens.steps();
  for (int64_t number = 0; number < steps; ++number) {
#pragma GCC unroll 16
    for (int line = 0; line < kAhead; line += 64) __builtin_prefetch(ahead + line, 0, 2);
    ahead += kAhead;
    Step<Kind::kHalves> step;
    reader.take(number, &step);
    const auto& ready = for_tokens<Kind, kCount>(step);
    const StepToken* x = tokens.owns(number);
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      acc[i] = add_codes<Kind>(acc[i], ready, x[i].own);
      if (__builtin_expect(x[i].groups_with_rest == 0, 1)) continue;
      chains[i].rest = add_rest<Kind>(chains[i].rest, ready, tokens.rests(number)[i], x[i].groups_with_rest);
      chains[i].has_rest = true;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) chains[i].own = acc[i];
}

template <class Kind, int kCount = kStepTokens>
inline void multiply_some_steps(int64_t count, const StepReader<Kind>& reader, const GroupTokens& tokens,
                                const uint8_t* ahead, StripChains* chains) {
  if (count == kCount) return multiply_steps<Kind, kCount>(reader, tokens, ahead, chains);
  if constexpr (kCount > 1) multiply_some_steps<Kind, kCount - 1>(count, reader, tokens, ahead, chains);
}

// A few tokens with kStepRows rows, the first at w.
inline void multiply_strip(RowKind kind, const StepRows& rows, int64_t features, const GroupTokens& tokens,
                           int64_t count, const uint8_t* ahead, StripChains* chains) {
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

  static int64_t tall_rows() { return 0; }
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
    const auto put = [&](int64_t s, int64_t token, const StripChains& chains) {
      const int64_t row = s * kStepRows;
      const StepResult<T, Out> result{block.bias ? block.bias + row : nullptr, block.y + row, block.y_stride,
                                      count_of(block, s)};
      result.put(token, chains.total());
    };
    const int64_t far = 1 + kBytesAhead / strip_bytes;  // strips
    for (int64_t s = 0; s < strips; ++s) {
      const int64_t past = s + far - strips;
      const uint8_t* ahead = past < 0 ? block.w + (s + far) * strip_bytes
                             : next   ? next->w + past * strip_bytes
                                      : block.w;
      StripChains chains[kStepTokens];
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

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

#endif
