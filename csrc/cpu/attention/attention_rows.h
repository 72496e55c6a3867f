// What happens to rows (one query head of one token each) in one key tile: scores, online softmax, weighted values.
//
// Rows share registers in tiles of up to kRowTile, and only the loads are shared: whatever the height of the tile, each
// number of a row is the end of the same chain of operations. A row takes part in a tile with its first `count` keys;
// what lies behind them is masked in the softmax and never multiplied, so not even a NaN there can reach the row.
#pragma once

#include "cpu/attention/attention_operands.h"

namespace quire {
namespace QUIRE_ISA {

// Registers: kRowTile x kColumns sums, kColumns vectors of keys or values, one query or probability.
#if defined(__AVX512F__)
constexpr int kRowTile = 6, kColumns = 4;
#elif defined(__AVX2__)
constexpr int kRowTile = 3, kColumns = 2;
#else
constexpr int kRowTile = 2, kColumns = 2;
#endif

// The online softmax of one row (arXiv:1805.02867), in one record of floats: the weighted values so far, D rounded up
// to whole steps and as parts of units (units.h); the sum of the weights, still in kLanes parts; the greatest score,
// to which both are relative.
struct RecordLayout {
  int64_t width;  // of the values

  RecordLayout(int64_t head_dim, int64_t step) : width((head_dim + step - 1) / step * step) {}
  int64_t size() const { return width + 2 * kLanes; }
  float* sums(float* record) const { return record + width; }
  float& greatest(float* record) const { return record[width + kLanes]; }
};

inline float infinity() { return __builtin_inff(); }

// What to subtract before exp. Where all scores are -inf, anything finite will do.
inline float shift(float greatest) { return greatest == -infinity() ? 0.0f : greatest; }

inline void clear(const RecordLayout& layout, float* record) {
  for (int64_t d = 0; d < layout.width + kLanes; d += kLanes) store(record + d, zero());
  layout.greatest(record) = -infinity();
}

// scores[row][key] = scale * q_row . k_key, for kVecs times four of sixteen keys
template <class T, int kRows, int kVecs>
inline void score_tile(const float* q, int64_t q_stride, const float* keys, int64_t quads, Vec scale, float* scores) {
  Vec sums[kRows][4];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < 4; ++j) sums[i][j] = zero();
  for (int64_t quad = 0; quad < quads; ++quad) {
    Vec k[kVecs];
    for (int j = 0; j < kVecs; ++j) k[j] = load(keys + (quad * 4 + j) * kLanes);
    for (int i = 0; i < kRows; ++i) {
      const Vec x = load_quad(q + i * q_stride + quad * 4);
      for (int j = 0; j < kVecs; ++j) sums[i][j] = Operands<T>::multiply_add(x, k[j], sums[i][j]);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    const Vec totals = mul(finish_quads(sums[i][0], sums[i][1], sums[i][2], sums[i][3]), scale);
    store_first(scores + i * kKeyTile, totals, 4 * kVecs);
  }
}

// Values where they lie in the cache, and values already widened. Either way the same floats.
template <class T>
struct CachedValues {
  static constexpr int kLine = 64 / sizeof(T);
  HeadRows<T> rows, ahead;  // ahead: those that come next
  void look_ahead(int key, int64_t d, int count) const {
    for (int i = 0; i < count; i += kLine) prefetch(ahead.at(key) + d + i);
  }
  // Vector j of those from d on, which begins a step.
  Vec at(int key, int64_t d, int j) const {
    using U = Units<T>;
    const Vec units = U::load(rows.at(key) + d + j / U::kParts * U::kStep);
    return j % U::kParts == 0 ? U::template part<0>(units) : U::template part<U::kParts - 1>(units);
  }
};
struct WideValues {
  const float* data;
  int64_t stride;
  void look_ahead(int, int64_t, int) const {}
  Vec at(int key, int64_t d, int j) const { return load(data + key * stride + d + j * kLanes); }
};

// record = factor * record + sum over keys [begin, end) of p_key v_key, in columns d and on.
template <class Values, int kRows, int kVecs>
inline void weigh_tile(const float* p, const Values& values, int begin, int end, int64_t d, const float* factors,
                       float* records, int64_t stride) {
  Vec sums[kRows][kVecs];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVecs; ++j) sums[i][j] = mul(load(records + i * stride + d + j * kLanes), set1(factors[i]));
  for (int key = begin; key < end; ++key) {
    Vec v[kVecs];
    for (int j = 0; j < kVecs; ++j) v[j] = values.at(key, d, j);
    values.look_ahead(key, d, kVecs * kLanes);
    for (int i = 0; i < kRows; ++i) {
      const Vec weight = set1(p[i * kKeyTile + key]);
      for (int j = 0; j < kVecs; ++j) sums[i][j] = fma(weight, v[j], sums[i][j]);
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVecs; ++j) store(records + i * stride + d + j * kLanes, sums[i][j]);
}

// Both of the above for any number of rows up to kRows, kVecs vectors at a time.
template <class T, int kRows = kRowTile>
inline void score(int rows, const float* q, int64_t q_stride, const float* keys, int64_t quads, Vec scale,
                  float* scores) {
  if constexpr (kRows > 1)
    if (rows < kRows) return score<T, kRows - 1>(rows, q, q_stride, keys, quads, scale, scores);
  for (int j = 0; j < 4; j += kColumns)
    score_tile<T, kRows, kColumns>(q, q_stride, keys + j * kLanes, quads, scale, scores + 4 * j);
}

template <class Values, int kRows = kRowTile, int kVecs = kColumns>
inline void weigh(int rows, const float* p, const Values& values, int begin, int end, const float* factors,
                  float* records, const RecordLayout& layout, int64_t d = 0) {
  if constexpr (kRows > 1)
    if (rows < kRows) return weigh<Values, kRows - 1, kVecs>(rows, p, values, begin, end, factors, records, layout, d);
  for (; d + kVecs * kLanes <= layout.width; d += kVecs * kLanes)
    weigh_tile<Values, kRows, kVecs>(p, values, begin, end, d, factors, records, layout.size());
  if constexpr (kVecs > 1)
    if (d < layout.width) weigh<Values, kRows, kVecs / 2>(kRows, p, values, begin, end, factors, records, layout, d);
}

// The greatest of a row's first `count` scores; the scores behind them become -inf.
inline float mask_and_max(float* scores, int count) {
  Vec greatest = set1(-infinity());
  int key = 0;
  for (; key + kLanes <= count; key += kLanes) greatest = max(load(scores + key), greatest);
  if (key < count) {
    const Vec last = keep_first(load(scores + key), count - key, set1(-infinity()));
    store(scores + key, last);
    greatest = max(last, greatest);
  }
  return reduce_max(greatest);
}

// The online softmax's step: scores become weights relative to the new greatest score; factors[i] is what row i's
// earlier weights are worth now. A row without keys in the tile keeps its record as it is.
inline void soften(int rows, float* scores, const int* counts, float* records, const RecordLayout& layout,
                   float* factors) {
  float old[kLanes] = {}, now[kLanes] = {};
  for (int i = 0; i < rows; ++i) {
    float& greatest = layout.greatest(records + i * layout.size());
    old[i] = greatest;
    if (counts[i] > 0) {
      const float here = mask_and_max(scores + i * kKeyTile, counts[i]);
      greatest = here > greatest ? here : greatest;
    }
    now[i] = shift(greatest);
  }
  store(factors, exp(sub(load(old), load(now))));
  for (int i = 0; i < rows; ++i) {
    if (counts[i] == 0) continue;
    float* row = scores + i * kKeyTile;
    float* sums = layout.sums(records + i * layout.size());
    const Vec base = set1(now[i]);
    Vec sum = mul(load(sums), set1(factors[i]));
    for (int key = 0; key < counts[i]; key += kLanes) {
      const Vec weight = exp(sub(load(row + key), base));  // of -inf: 0, which changes no sum
      store(row + key, weight);
      sum = add(sum, weight);
    }
    store(sums, sum);
  }
}

// Weighted values of a row tile. Keys that all its rows see go through the tile, the few others row by row.
template <class Values>
inline void gather(int rows, const float* p, const Values& values, const int* counts, const float* factors,
                   float* records, const RecordLayout& layout) {
  int shared = counts[0];
  for (int i = 1; i < rows; ++i) shared = counts[i] < shared ? counts[i] : shared;
  if (shared > 0) weigh(rows, p, values, 0, shared, factors, records, layout);
  const float one = 1.0f;  // a product with it is exact
  for (int i = 0; i < rows; ++i)
    if (counts[i] > shared)
      weigh<Values, 1>(1, p + i * kKeyTile, values, shared, counts[i], shared > 0 ? &one : factors + i,
                       records + i * layout.size(), layout);
}

// Adds a later span's record to that of all the spans before it.
inline void merge(const RecordLayout& layout, float* record, float* later) {
  float& greatest = layout.greatest(record);
  const float before = greatest, after = layout.greatest(later);
  greatest = after > before ? after : before;
  const Vec base = set1(shift(greatest));
  const Vec mine = exp(sub(set1(before), base)), theirs = exp(sub(set1(after), base));
  for (int64_t d = 0; d < layout.width + kLanes; d += kLanes)
    store(record + d, fma(load(later + d), theirs, mul(load(record + d), mine)));
}

template <class T>
inline void finish(const RecordLayout& layout, float* record, int64_t head_dim, T* out) {
  using U = Units<T>;
  const Vec total = set1(reduce_add(load(layout.sums(record))));
  for (int64_t d = 0; d < head_dim; d += U::kStep) {
    Vec values[U::kParts];
    for (int i = 0; i < U::kParts; ++i) values[i] = div(load(record + d + i * kLanes), total);
    U::in_order(values);
    for (int i = 0; i < U::kParts; ++i) {
      const int64_t at = d + i * kLanes, left = head_dim - at;
      if (left >= kLanes)
        store(out + at, values[i]);
      else if (left > 0)
        store_first(out + at, values[i], static_cast<int>(left));
    }
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
