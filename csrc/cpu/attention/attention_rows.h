// What happens to rows (one query head of one token each) in one key tile: scores, online softmax, weighted values.
//
// Rows share registers in tiles of up to kRowTile, and only the loads are shared: whatever the height of the tile, each
// number of a row is the end of the same chain of operations. A row takes part in a tile with the keys that it sees;
// what lies around them is masked in the softmax and never multiplied, so not even a NaN there can reach the row.
#pragma once

#include "cpu/attention/attention_operands.h"

namespace quire {
namespace QUIRE_ISA {

// Registers: kRowTile x kColumns sums, kColumns vectors of keys or values, one query or probability. Scores of up to
// kCachedRows rows are made of keys in the cache, kKeySets times four of them at once.
#if defined(__AVX512F__)
constexpr int kRowTile = 6, kColumns = 4, kCachedRows = 2, kKeySets = 2;
#elif defined(__AVX2__)
constexpr int kRowTile = 3, kColumns = 2, kCachedRows = 2, kKeySets = 1;
#else
constexpr int kRowTile = 2, kColumns = 2, kCachedRows = 2, kKeySets = 1;
#endif

// Keys begin .. end of a tile: those that a row sees.
struct TileRange {
  int begin, end;
  bool empty() const { return begin == end; }
  int first_of_register() const { return begin / kLanes * kLanes; }
};

// The online softmax of one row (arXiv:1805.02867), in one record of floats: the weighted values so far, DV rounded up
// to whole steps and as parts of units (units.h); the sum of the weights, still in kLanes parts; the greatest score,
// to which both are relative.
struct RecordLayout {
  int64_t width;  // of the values

  RecordLayout(int64_t value_dim, int64_t step) : width((value_dim + step - 1) / step * step) {}
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

// Quad `quad` of a step of kSets times four keys, by all its parts, onto the sums of kRows rows; q: the rows' quad.
template <class T, int kRows, int kSets, int kPart = 0>
inline void add_quad(const float* q, int64_t q_stride, const Vec (&units)[kSets][4], int quad, Vec (&sums)[kRows][4],
                     int set) {
  using O = Operands<T>;
  Vec k[kSets];
  for (int j = 0; j < kSets; ++j) k[j] = O::template part<kPart>(units[j][quad]);
  for (int i = 0; i < kRows; ++i) {
    const Vec x = load_quad(q + i * q_stride + kPart * 4);
    for (int j = 0; j < kSets; ++j) sums[i][set + j] = O::multiply_add(x, k[j], sums[i][set + j]);
  }
  if constexpr (kPart + 1 < O::kParts) add_quad<T, kRows, kSets, kPart + 1>(q, q_stride, units, quad, sums, set);
}

// scores[row][key] = scale * q_row . k_key, for sixteen keys where they lie in the cache: the operations of pack_keys and
// score_tile, with no memory between them. What few rows take; more share what is packed once.
template <class T, int kRows, class S>
inline void score_cached(const float* q, int64_t q_stride, HeadRows<S> keys, HeadRows<S> ahead, int64_t head_dim,
                         Vec scale, float* scores) {
  using O = Operands<T>;
  const int64_t quads = quad_count<T>(head_dim) / O::kParts;
  Vec sums[kRows][4];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < 4; ++j) sums[i][j] = zero();
#pragma GCC unroll 4
  for (int set = 0; set < 4; set += kKeySets) {
    const float* at = q;
    int64_t d = 0;
    Vec units[kKeySets][4];
    for (; d + O::kStep <= head_dim; d += O::kStep) {
#pragma GCC unroll 8
      for (int i = 0; i < 4 * kKeySets; ++i) {
        units[i / 4][i % 4] = O::load(keys.at(4 * set + i) + d);
        prefetch(ahead.at(4 * set + i) + d);
      }
      for (int j = 0; j < kKeySets; ++j) turn_quads(units[j]);
#pragma GCC unroll 4
      for (int quad = 0; quad < 4; ++quad, at += O::kParts * 4)
        add_quad<T, kRows, kKeySets>(at, q_stride, units, quad, sums, set);
    }
    if (d < head_dim) {
      for (int i = 0; i < 4 * kKeySets; ++i)
        units[i / 4][i % 4] = O::load(keys.at(4 * set + i) + d, static_cast<int>(head_dim - d));
      for (int j = 0; j < kKeySets; ++j) turn_quads(units[j]);
      for (int quad = 0; d / O::kStep * 4 + quad < quads; ++quad, at += O::kParts * 4)
        add_quad<T, kRows, kKeySets>(at, q_stride, units, quad, sums, set);
    }
  }
  for (int i = 0; i < kRows; ++i)
    store(scores + i * kKeyTile, mul(finish_quads(sums[i][0], sums[i][1], sums[i][2], sums[i][3]), scale));
}

// Values where they lie in the cache, and values already widened. Either way the same floats.
template <class T>
struct CachedValues {
  static constexpr int kLine = 64 / sizeof(T);
  HeadRows<T> rows;
  const HeadRows<T>* ahead;  // of every sixteen
  void look_ahead(int key, int64_t d, int count) const {
    const T* next = ahead[key / kLanes].at(key % kLanes) + d;
    for (int i = 0; i < count; i += kLine) prefetch(next + i);
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

// What is added to the scores of sixteen keys; own: of a head, where distance 0 lies; first: the first key's distance.
inline Vec biases_from(const float* own, int64_t reach, int64_t first) {
  if (first >= -reach && first + kLanes - 1 <= reach) return load(own + first);
  if (first >= reach) return set1(own[reach]);
  if (first + kLanes - 1 <= -reach) return set1(own[-reach]);
  float each[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) {
    const int64_t distance = first + i;
    each[i] = own[distance < -reach ? -reach : distance > reach ? reach : distance];
  }
  return load(each);
}

// The one place where scores are more than scaled products: the head's own scale, the soft cap, ALiBi, biases by distance.
// distance: from the row's position to the tile's first key's.
inline void change_scores(const AttentionArgs& args, int64_t head, int64_t distance, TileRange seen, float* scores) {
  static constexpr float kNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int key = seen.first_of_register(); key < seen.end; key += kLanes) {
    Vec x = load(scores + key);
    if (args.head_scales) x = mul(x, set1(args.head_scales[head]));
    if (args.softcap > 0) x = mul(tanh(div(x, set1(args.softcap))), set1(args.softcap));
    if (args.slopes) {
      const Vec distances = add(set1(static_cast<float>(distance + key)), load(kNumbers));
      x = fma(distances, set1(args.slopes[head]), x);
    }
    if (args.biases) {
      const int64_t reach = args.bias_reach;
      x = add(x, biases_from(args.biases + head * (2 * reach + 1) + reach, reach, distance + key));
    }
    store(scores + key, x);
  }
}

// The greatest of the scores that a row sees; those around them, in the same registers, become -inf.
inline float mask_and_max(float* scores, TileRange seen) {
  Vec greatest = set1(-infinity());
  int key = seen.first_of_register();
  if (key < seen.begin) store(scores + key, keep_first(greatest, seen.begin - key, load(scores + key)));
  for (; key + kLanes <= seen.end; key += kLanes) greatest = max(load(scores + key), greatest);
  if (key < seen.end) {
    const Vec last = keep_first(load(scores + key), seen.end - key, set1(-infinity()));
    store(scores + key, last);
    greatest = max(last, greatest);
  }
  return reduce_max(greatest);
}

// The online softmax's step: scores become weights relative to the new greatest score; factors[i] is what row i's
// earlier weights are worth now. A row without keys in the tile keeps its record as it is.
inline void soften(int rows, float* scores, const TileRange* seen, float* records, const RecordLayout& layout,
                   float* factors) {
  float old[kLanes] = {}, now[kLanes] = {};
  for (int i = 0; i < rows; ++i) {
    float& greatest = layout.greatest(records + i * layout.size());
    old[i] = greatest;
    if (!seen[i].empty()) {
      const float here = mask_and_max(scores + i * kKeyTile, seen[i]);
      greatest = here > greatest ? here : greatest;
    }
    now[i] = shift(greatest);
  }
  store(factors, exp(sub(load(old), load(now))));
  for (int i = 0; i < rows; ++i) {
    if (seen[i].empty()) continue;
    float* row = scores + i * kKeyTile;
    float* sums = layout.sums(records + i * layout.size());
    const Vec base = set1(now[i]);
    Vec sum = mul(load(sums), set1(factors[i]));
    for (int key = seen[i].first_of_register(); key < seen[i].end; key += kLanes) {
      const Vec weight = exp(sub(load(row + key), base));  // of -inf: 0, which changes no sum
      store(row + key, weight);
      sum = add(sum, weight);
    }
    store(sums, sum);
  }
}

// Weighted values of a row tile. Keys that all its rows see go through the tile, the few others row by row; each row
// takes its own in their order.
template <class Values>
inline void gather(int rows, const float* p, const Values& values, const TileRange* seen, float* factors,
                   float* records, const RecordLayout& layout) {
  TileRange shared = seen[0];
  for (int i = 1; i < rows; ++i) {
    shared.begin = seen[i].begin > shared.begin ? seen[i].begin : shared.begin;
    shared.end = seen[i].end < shared.end ? seen[i].end : shared.end;
  }
  const auto weigh_row = [&](int i, int begin, int end) {
    if (begin >= end) return;
    weigh<Values, 1>(1, p + i * kKeyTile, values, begin, end, factors + i, records + i * layout.size(), layout);
    factors[i] = 1.0f;  // a product with it is exact
  };
  if (shared.begin >= shared.end) {
    for (int i = 0; i < rows; ++i) weigh_row(i, seen[i].begin, seen[i].end);
    return;
  }
  if (shared.begin > 0)
    for (int i = 0; i < rows; ++i) weigh_row(i, seen[i].begin, shared.begin);
  weigh(rows, p, values, shared.begin, shared.end, factors, records, layout);
  if (shared.end == kKeyTile) return;
  for (int i = 0; i < rows; ++i) {
    factors[i] = 1.0f;
    weigh_row(i, shared.end, seen[i].end);
  }
}

inline void copy(const RecordLayout& layout, float* record, const float* from) {
  for (int64_t d = 0; d < layout.width + kLanes; d += kLanes) store(record + d, load(from + d));
  record[layout.width + kLanes] = from[layout.width + kLanes];
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

// Makes the sink one more score of the record, whose value is 0.
inline void add_sink(const RecordLayout& layout, float* record, float sink) {
  const float greatest = layout.greatest(record);
  const Vec base = set1(shift(sink > greatest ? sink : greatest)), mine = exp(sub(set1(greatest), base));
  for (int64_t d = 0; d < layout.width + kLanes; d += kLanes) store(record + d, mul(load(record + d), mine));
  const Vec weight = keep_first(exp(sub(set1(sink), base)), 1, zero());
  store(layout.sums(record), add(load(layout.sums(record)), weight));
}

// U: the order in which the record has the values, as units (units.h).
template <class U, class T>
inline void finish(const RecordLayout& layout, float* record, int64_t value_dim, T* out) {
  const Vec total = set1(reduce_add(load(layout.sums(record))));
  for (int64_t d = 0; d < value_dim; d += U::kStep) {
    Vec values[U::kParts];
    for (int i = 0; i < U::kParts; ++i) values[i] = div(load(record + d + i * kLanes), total);
    U::in_order(values);
    for (int i = 0; i < U::kParts; ++i) {
      const int64_t at = d + i * kLanes, left = value_dim - at;
      if (left >= kLanes)
        store(out + at, values[i]);
      else if (left > 0)
        store_first(out + at, values[i], static_cast<int>(left));
    }
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
