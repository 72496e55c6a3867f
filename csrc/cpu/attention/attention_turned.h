// Scores of many rows against keys that are turned: a register has one unit of each of sixteen keys.
//
// The sums are those of keys packed by quads (attention_rows.h), bit for bit: unit u goes to partial sum u % 4, and
// these are added 0 + 2 and 1 + 3 first. There, the partial sums of a score lie in one register, and come together by
// ten operations; here they are made two at a time, and come together by three. Turning takes twice as long.
#pragma once

#if defined(__AVX512F__)

#include "cpu/attention/attention_rows.h"
#include "cpu/common/transpose.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int kTurnedVecs = 2, kTurnedKeys = kTurnedVecs * kLanes, kTurnedRows = 6;

// Units of a key, up to whole quads.
template <class T>
inline int64_t turned_units(int64_t head_dim) {
  return quad_count<T>(head_dim) / Operands<T>::kParts * 4;
}

// The tile's wanted keys as turned [kKeyTile / kTurnedKeys][units][kTurnedKeys], in whole parts of kTurnedKeys; others are
// asked for meanwhile.
template <class T, class S>
inline void turn_keys(const HeadRows<S>& keys, const Ahead<S>& ahead, TileRange wanted, int64_t head_dim,
                      float* turned) {
  using O = Operands<T>;
  const int64_t units = turned_units<T>(head_dim);
  const int first = wanted.begin / kTurnedKeys * kTurnedVecs, end = (wanted.end + kTurnedKeys - 1) / kTurnedKeys;
  for (int part = first; part < end * kTurnedVecs; ++part) {
    const HeadRows<S> rows = keys.from(part * kLanes), next = ahead.while_scored[part];
    float* to = turned + part / kTurnedVecs * units * kTurnedKeys + part % kTurnedVecs * kLanes;
    for (int64_t d = 0, unit = 0; d < head_dim; d += O::kStep, unit += kLanes) {
      const int64_t left = head_dim - d;
      Vec columns[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        columns[i] = left < O::kStep ? O::load(rows.at(i) + d, static_cast<int>(left)) : O::load(rows.at(i) + d);
        prefetch(next.at(i) + d);
      }
      transpose(columns);
      if (unit + kLanes <= units) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(to + (unit + i) * kTurnedKeys, columns[i]);
      } else {
        for (int i = 0; unit + i < units; ++i) store(to + (unit + i) * kTurnedKeys, columns[i]);
      }
    }
  }
}

// Two partial sums' units, kTurnedKeys apart by two, by all their parts, onto the sums; q: the rows, as pack_query has them.
template <class T, int kRows>
inline __attribute__((always_inline)) void add_units(const float* q, int64_t q_stride, const float* keys, int64_t quads,
                                                     Vec (&sums)[2][kRows][kTurnedVecs]) {
  using O = Operands<T>;
  for (int64_t n = 0; n < quads; ++n, keys += 4 * kTurnedKeys) {
#pragma GCC unroll 2
    for (int part = 0; part < O::kParts; ++part, q += 4)
#pragma GCC unroll 2
      for (int s = 0; s < 2; ++s) {
        const float* of_sum = keys + 2 * s * kTurnedKeys;
        Vec k[kTurnedVecs];
#pragma GCC unroll 2
        for (int j = 0; j < kTurnedVecs; ++j) {
          const Vec units = load(of_sum + j * kLanes);
          k[j] = part == 0 ? O::template part<0>(units) : O::template part<O::kParts - 1>(units);
        }
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) {
          const Vec x = set1(q[i * q_stride + 2 * s]);
#pragma GCC unroll 2
          for (int j = 0; j < kTurnedVecs; ++j) sums[s][i][j] = O::multiply_add(x, k[j], sums[s][i][j]);
        }
      }
  }
}

// scores[row][key] = scale * q_row . k_key, for kTurnedKeys keys. (Not to be inlined: beside other code, GCC keeps sums in
// memory.)
template <class T, int kRows>
__attribute__((noinline)) void score_turned_tile(const float* q, int64_t q_stride, const float* keys, int64_t units,
                                                 Vec scale, float* scores) {
  for (int n = 0; n < 2; ++n) {  // partial sums 0 and 2, whose total waits among the scores; 1 and 3
    Vec sums[2][kRows][kTurnedVecs];
#pragma GCC unroll 2
    for (int s = 0; s < 2; ++s)
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < kTurnedVecs; ++j) sums[s][i][j] = zero();
    add_units<T, kRows>(q + n, q_stride, keys + n * kTurnedKeys, units / 4, sums);
    if (n == 0) {
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < kTurnedVecs; ++j)
          store(scores + i * kKeyTile + j * kLanes, add(sums[0][i][j], sums[1][i][j]));
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < kTurnedVecs; ++j) {
          float* score = scores + i * kKeyTile + j * kLanes;
          store(score, mul(add(load(score), add(sums[0][i][j], sums[1][i][j])), scale));
        }
    }
  }
}

template <class T, int kRows = kTurnedRows>
inline void score_turned(int rows, const float* q, int64_t q_stride, const float* keys, int64_t units, Vec scale,
                         float* scores) {
  if constexpr (kRows > 1)
    if (rows < kRows) return score_turned<T, kRows - 1>(rows, q, q_stride, keys, units, scale, scores);
  score_turned_tile<T, kRows>(q, q_stride, keys, units, scale, scores);
}

}  // namespace QUIRE_ISA
}  // namespace quire

#endif
