// Products of x in int8 with rows of groups: exact whole numbers within a group, floats between groups.
//
// An element is four chains of additions, group g's in chain g % 4, in rising order: fma(dot product, scale of w * scale
// of x, chain), and where there is a minimum, fma(minimum of w, scale of x * sum of x's codes, chain) behind it. With
// factors of halves, the dot product is the sum of both halves', times their factors, and likewise with minimums, which
// are then scaled by minimum of w * scale of x. Up to a multiple of four groups, zeros are added. The element is
// (chain 0 + chain 1) + (chain 2 + chain 3); where the token has second codes, plus the same of these in chains of their
// own; then the bias. So its bits depend on its row and its token alone.
#pragma once

#include "cpu/linear/linear_cut.h"
#include "cpu/quantized/tokens.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline int dot(const int8_t* a, const int8_t* b, int64_t n) {
  int sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// A group's share of an element.
template <class Kind>
inline float add_group(const Group32& w, const QuantizedGroup& x, float chain) {
  int total;
  if constexpr (Kind::kHalves)
    total = dot(w.codes, x.codes, 16) * w.factors[0] + dot(w.codes + 16, x.codes + 16, 16) * w.factors[1];
  else
    total = dot(w.codes, x.codes, kGroup);
  chain = multiply_add(static_cast<float>(total), w.scale * x.scale, chain);
  if constexpr (Kind::kMinimum && Kind::kHalves)
    chain = multiply_add(static_cast<float>(x.sums[0] * w.low[0] + x.sums[1] * w.low[1]), w.minimum * x.scale, chain);
  else if constexpr (Kind::kMinimum)
    chain = multiply_add(w.minimum, x.scale * static_cast<float>(x.sum()), chain);
  return chain;
}

template <class Kind>
inline float multiply_row(const Group32* groups, GroupedTokens::Token x, int64_t count) {
  float chains[4] = {}, rests[4] = {};
  bool has_rest = false;
  for (int64_t g = 0; g < count; ++g) {
    chains[g % 4] = add_group<Kind>(groups[g], x[g].own, chains[g % 4]);
    if (!x[g].has_rest) continue;
    rests[g % 4] = add_group<Kind>(groups[g], x[g].rest, rests[g % 4]);
    has_rest = true;
  }
  // Zeros up to a multiple of four groups.
  for (int64_t g = count; g % 4; ++g) chains[g % 4] += 0.0f;
  const float own = (chains[0] + chains[1]) + (chains[2] + chains[3]);
  return has_rest ? own + ((rests[0] + rests[1]) + (rests[2] + rests[3])) : own;
}

// kWholeRows: of int8 rows, with one scale a row of x and of w.
template <class T, class Out, bool kWholeRows>
class IntegerProducts {
 public:
  using Stored = uint8_t;
  using Flushed = float;
  static constexpr int kBlockRows = 4;
  static constexpr bool kLongBlocks = true;
  static constexpr int64_t kTurnGrain = 1;

  explicit IntegerProducts(const LinearArgs& args) : args_(args), x_(args) {}

  static int64_t tall_rows() { return 0; }
  int64_t row_bytes() const { return mean_row_bytes(args_); }
  int64_t tiles() const { return args_.tokens; }
  void turn(int64_t begin, int64_t end) const {
    for (int64_t token = begin; token < end; ++token) x_.template quantize_token<T>(token);
  }
  int64_t parts() const { return 1; }
  int64_t first_of(int64_t part) const { return part * args_.tokens; }

  void run(const LinearBlock<T, Out, uint8_t>& block, const LinearBlock<T, Out, uint8_t>*) const {
    const RowFormat& format = args_.formats[block.weight];
    for (int64_t row = 0; row < block.rows; ++row) {
      const uint8_t* bytes = block.w + row * format.row_bytes;
      const auto put = [&](int64_t token, float total) {
        Vec value = set1(total);
        if (block.bias) value = add(value, load_first(block.bias + row, 1));
        store_first(block.y + token * block.y_stride + row, value, 1);
      };
      if constexpr (kWholeRows) {
        const float scale = read<float>(bytes);
        const int8_t* codes = reinterpret_cast<const int8_t*>(bytes + sizeof scale);
        for (int64_t t = 0; t < args_.tokens; ++t) {
          const int total = dot(codes, x_[t].codes, args_.features);
          put(t, static_cast<float>(total) * (scale * x_[t].scale));
        }
      } else {
        for_kind(format.kind, [&](auto kind) { multiply<decltype(kind)>(bytes, put); });
      }
    }
  }

 private:
  template <class Kind, class Put>
  void multiply(const uint8_t* bytes, const Put& put) const {
    Group32* groups = scratch<Group32, IntegerProducts>(x_.groups());
    for (int64_t g = 0; g < x_.groups(); ++g) {
      const int64_t k = g * kGroup;
      Kind::take(bytes + k / Kind::kColumns * Kind::kBytes, static_cast<int>(k % Kind::kColumns / kGroup), groups + g);
    }
    for (int64_t t = 0; t < args_.tokens; ++t) put(t, multiply_row<Kind>(groups, x_[t], x_.groups()));
  }

  const LinearArgs& args_;
  const typename TokensOf<kWholeRows>::Type x_;
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire
