// The form in which linear_columns.h multiplies, on registers of 512 bits: one partial sum of each of sixteen rows in a
// register. A product has sixteen partial sums, as in linear_dot.h: number c takes the units c, c + 16, c + 32 ... of 32
// bits. What belongs to one of them is a chain. Both factors are turned:
//
//   tokens   [tiles of kTokens]  of [kChains][steps][as many as the widest tile has]
//   weights  [groups of kRows]   of [kChains][steps][kRows]
//
// with chains in kOrder. Tokens are turned in each call. A weight is turned once, when it is loaded (`packed`: groups lie
// one behind the other, in as many bytes as the rows had), or, where it lies in rows, a group at a time in each call.
#pragma once

#if defined(__AVX512F__)

#include "cpu/common/transpose.h"
#include "cpu/linear/dot.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

template <class T>
struct Columns {
  using D = Dot<T>;
  static constexpr int kTokens = 12, kVecs = 2, kRows = kVecs * kLanes;
  static constexpr int kLevels = 4, kChains = 1 << kLevels;  // of the tree that adds the partial sums up
  // Which partial sum is made as number i: so that each one's counterpart in the tree is there when it is needed.
  static constexpr int kOrder[kChains] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};

  static int64_t steps(int64_t features) { return (features + D::kStep - 1) / D::kStep; }

  // Floats of a chain's share. Powers of two would crowd the same few places of a cache.
  static int64_t chain_tokens(int64_t steps, int64_t width) { return steps * width + kLanes; }
  static int64_t chain_rows(int64_t steps) { return steps * kRows + kLanes; }
  static int64_t packed_chain(int64_t steps) { return steps * kRows; }
  static int64_t tile_size(int64_t steps) { return kChains * chain_tokens(steps, kTokens); }
  static int64_t turned_rows(int64_t steps) { return kChains * chain_rows(steps); }

  // to[chain][step][width]: sixteen rows, of which the first `count` are there. The last of them stands for the others,
  // too: what is computed of these is not kept. What does not fit in `width` is written over by the next step, and behind
  // the last one there is room for it. stride: from a row to the next one; chain: from a chain to the next one.
  static void turn(const T* rows, int64_t stride, int64_t count, int64_t features, int64_t chain, int64_t width,
                   float* to) {
    const T* from[kLanes];
    for (int i = 0; i < kLanes; ++i) from[i] = rows + (i < count ? i : count - 1) * stride;
    const auto turn_step = [&](const auto& units_of) {
      Vec units[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) units[i] = {units_of(from[i])};
      transpose(units);
#pragma GCC unroll 16
      for (int i = 0; i < kChains; ++i) store(to + i * chain, units[kOrder[i]]);
    };
    const int64_t whole = features / D::kStep * D::kStep;
    for (int64_t at = 0; at < whole; at += D::kStep, to += width)
      turn_step([at](const T* row) { return D::units(row + at); });
    const int left = static_cast<int>(features - whole);
    if (left > 0) turn_step([whole, left](const T* row) { return D::units(row + whole, left); });
  }

  // A group of `count` rows. Of a second half without rows, whatever lies there is multiplied.
  static void turn_group(const T* rows, int64_t count, int64_t features, int64_t chain, float* to) {
    for (int64_t at = 0; at < count && at < kRows; at += kLanes)
      turn(rows + at * features, features, count - at, features, chain, kRows, to + at);
  }

  // A row of packed weights as it was: to[features].
  static void turn_back(const T* packed, int64_t row, int64_t features, T* to) {
    static_assert(D::kStep * sizeof(T) == kLanes * sizeof(float), "a step is a register of units");
    const int64_t steps = features / D::kStep;
    const float* from = reinterpret_cast<const float*>(packed + row / kRows * kRows * features) + row % kRows;
    // kOrder reverses four bits: it says of each partial sum, too, as which number it is made.
    const __m512i places =
        _mm512_mullo_epi32(_mm512_loadu_si512(kOrder), _mm512_set1_epi32(static_cast<int>(packed_chain(steps))));
    for (int64_t step = 0; step < steps; ++step, from += kRows, to += D::kStep)
      _mm512_storeu_ps(to, _mm512_i32gather_ps(places, from, sizeof(float)));
  }
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

#endif
