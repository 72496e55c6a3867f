// Keys and queries as the scores' inner loop wants them.
//
// A unit is what one multiplication takes of a row: a float or, where the processor has dot products of bfloat16, a
// pair of elements. A score has four partial sums: unit u goes to number u % 4 (of bf16 as floats, the units of
// units.h one after the other). Keys are packed four to a register, a quad of units of each, sixteen keys side by
// side: turning them there costs two shuffles a register, and a score's sums need but few more at its end.
#pragma once

#include "cpu/common/kernels.h"
#include "cpu/common/processor.h"
#include "cpu/common/split_pairs.h"
#include "cpu/common/units.h"

namespace quire {
namespace QUIRE_ISA {

// Keys that one step of the online softmax covers. Tiles lie at multiples of it from position 0.
constexpr int kKeyTile = 64;

template <class T>
struct Operands : Units<T> {
  static Vec multiply_add(Vec q, Vec k, Vec sum) { return fma(q, k, sum); }
};

#if defined(__AVX512BF16__)
template <>
struct Operands<bf16> : Units<bf16> {
  static constexpr int kParts = 1;
  template <int>
  static Vec part(Vec units) {
    return units;
  }
  static Vec multiply_add(Vec q, Vec k, Vec sum) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_castps_si512(q.v), (__m512bh)_mm512_castps_si512(k.v))};
  }
};

template <>
struct Operands<SplitPairs> : Units<SplitPairs> {
  template <int kPart>
  static Vec part(Vec units) {
    return Units<SplitPairs>::part<1 - kPart>(units);
  }
  static Vec multiply_add(Vec q, Vec k, Vec sum) { return fma(q, k, sum); }
};
#endif

// The rows of a tile's keys or values, of one head: so far behind those of the first.
template <class T>
struct HeadRows {
  const T* const* rows;
  int64_t offset;
  const T* at(int64_t i) const { return rows[i] + offset; }
  HeadRows from(int64_t i) const { return {rows + i, offset}; }
};

// Into the first-level cache, from which it soon goes on to the second; on AMD's processors before Zen 5 into the second
// alone: of a first-level cache of 32 KB the next tile drives this one out (two Zen 4 cores, 16 streams at 3,500 tokens:
// 22 GB/s instead of 15). Spread over the work, one line here and there: in bursts, prefetches wait for one another and
// the loads wait for them.
inline void prefetch(const void* p) {
  if (kAmdBeforeZen5)
    __builtin_prefetch(p, 0, 2);
  else
    __builtin_prefetch(p, 0, 3);
}

// Whether a head's rows of the next tile are asked for by turns, one of each sixteen, rather than block by block as
// memory has them. On AMD's processors of family 26, the more it goes in memory's order, the slower: one thread takes
// 8.4 ms line by line, 6.1 block by block, 4.7 head by head and 4.3 by turns (16 streams at 3,500 tokens). On those
// before them memory's order was the fastest.
inline bool asks_by_turns() { return kAmdSinceZen5; }

// What is asked for while a head's part of a tile is worked on: sixteen rows for every sixteen keys that are scored, then
// sixteen for every sixteen values.
template <class S>
struct Ahead {
  static constexpr int kParts = kKeyTile / kLanes;
  HeadRows<S> while_scored[kParts], while_weighed[kParts];
};

// How many times a score's four sums are added to.
template <class T>
inline int64_t quad_count(int64_t head_dim) {
  using O = Operands<T>;
  const int64_t elements = 4 * O::kStep / kLanes;  // of a quad of units
  return (head_dim + elements - 1) / elements * O::kParts;
}

template <class T, int kPart = 0>
inline void put_parts(Vec units, float* packed, int64_t stride) {
  using O = Operands<T>;
  store(packed + kPart * stride, O::template part<kPart>(units));
  if constexpr (kPart + 1 < O::kParts) put_parts<T, kPart + 1>(units, packed, stride);
}

// Sixteen keys, rows of S, as packed [quads][4 registers of 4 keys]; sixteen others are asked for meanwhile.
template <class T, class S>
inline void pack_keys(HeadRows<S> keys, HeadRows<S> ahead, int64_t head_dim, float* packed) {
  using O = Operands<T>;
  constexpr int kStride = 4 * kLanes, kStep = O::kStep;  // floats of a quad; elements of four
  const int64_t quads = quad_count<T>(head_dim) / O::kParts;
  for (int j = 0; j < 4; ++j, keys = keys.from(4), ahead = ahead.from(4), packed += kLanes) {
    const S* row[4] = {keys.at(0), keys.at(1), keys.at(2), keys.at(3)};
    const S* next[4] = {ahead.at(0), ahead.at(1), ahead.at(2), ahead.at(3)};
    float* to = packed;
    int64_t d = 0;
    for (; d + kStep <= head_dim; d += kStep) {
      Vec units[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        units[i] = O::load(row[i] + d);
        prefetch(next[i] + d);
      }
      turn_quads(units);
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q, to += O::kParts * kStride) put_parts<T>(units[q], to, kStride);
    }
    if (d < head_dim) {
      Vec units[4];
      for (int i = 0; i < 4; ++i) units[i] = O::load(row[i] + d, static_cast<int>(head_dim - d));
      turn_quads(units);
      for (int q = 0; d / kStep * 4 + q < quads; ++q, to += O::kParts * kStride) put_parts<T>(units[q], to, kStride);
    }
  }
}

// One query row, quad by quad as keys are packed; quads past the row's end are zeros, up to whole steps.
template <class T>
inline void pack_query(const T* row, int64_t head_dim, float* packed) {
  using O = Operands<T>;
  for (int64_t d = 0; d < head_dim; d += O::kStep, packed += O::kParts * kLanes) {
    const int64_t left = head_dim - d;
    const Vec units = left < O::kStep ? O::load(row + d, static_cast<int>(left)) : O::load(row + d);
    if constexpr (O::kParts == 1) {
      put_parts<T>(units, packed, kLanes);
      continue;
    }
    float parts[O::kParts * kLanes];
    put_parts<T>(units, parts, kLanes);
    for (int q = 0; q < 4; ++q)
      for (int p = 0; p < O::kParts; ++p)
        __builtin_memcpy(packed + (q * O::kParts + p) * 4, parts + p * kLanes + 4 * q, 4 * sizeof(float));
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
