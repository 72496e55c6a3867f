// A key tile's work on processors that multiply pairs of bf16 (AVX-512-BF16), for rows of bf16.
//
// A row's chain of operations is the same whatever is computed beside it:
//  * A score has the four partial sums of attention_rows.h, from keys where they lie or turned.
//  * Weights are relative to the greatest score so far (base 2, power_of_two) and rounded to bf16.
//  * A record is multiplied by its factor; then the tile adds weighted values, a pair of keys at a time, and to the sum of
//    the weights these as they were rounded. (With rows of int8, as they were before they were scaled and rounded.)
// Pairs lie at even positions. A key that a row does not see has a weight of 0, and values that no row sees are zeros. Where
// a row could meet a value that it does not see and that is no finite number, each row is weighed apart with what it sees.
#pragma once

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

#include "cpu/attention/attention_item.h"
#include "cpu/attention/attention_scales.h"
#include "cpu/attention/attention_turned.h"
#include "cpu/attention/attention_weights.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int kTilePairs = kKeyTile / 2, kPairRows = 2 * kTurnedRows;

// Values of a pair of keys, 32 columns of them, as they lie in the cache; asks for others meanwhile.
template <class S>
struct CachedPairs {
  HeadRows<S> rows;
  const HeadRows<S>* ahead;  // of every sixteen; null: nothing is asked for
  TileRange seen;            // the other values count as zeros
  int64_t value_dim;

  void take(int pair, int64_t d, Vec* values) const {
    const uint32_t key = 2 * static_cast<uint32_t>(pair);  // unsigned: by shifts and masks alone
    pair_values(row(key, d), row(key + 1, d), values);
    if (!ahead) return;
    const HeadRows<S>& next = ahead[key / kLanes];
    prefetch(next.at(key % kLanes) + d);
    prefetch(next.at(key % kLanes + 1) + d);
  }

 private:
  __m512i row(uint32_t key, int64_t d) const {
    if (key - static_cast<uint32_t>(seen.begin) >= static_cast<uint32_t>(seen.end - seen.begin))
      return _mm512_setzero_si512();
    const S* from = rows.at(key) + d;
    const int64_t left = value_dim - d;
    const Vec units =
        left < PairOrder::kStep ? Units<bf16>::load(from, static_cast<int>(left)) : Units<bf16>::load(from);
    return _mm512_castps_si512(units.v);
  }
};

// [pairs][width], as CachedPairs gives them.
struct PackedPairs {
  const float* data;
  int64_t width;
  void take(int pair, int64_t d, Vec* values) const {
    values[0] = load(data + pair * width + d);
    values[1] = load(data + pair * width + d + kLanes);
  }
};

// Those of one row: what it does not see counts as zeros.
template <class Values>
struct SeenPairs {
  const Values& values;
  TileRange seen;
  void take(int pair, int64_t d, Vec* own) const {
    values.take(pair, d, own);
    const int key = 2 * pair;
    const uint32_t first = seen.begin <= key && key < seen.end ? 0xffffu : 0u;
    const uint32_t second = seen.begin <= key + 1 && key + 1 < seen.end ? 0xffff0000u : 0u;
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(first | second));
    for (int i = 0; i < 2; ++i) own[i].v = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(own[i].v), mask));
  }
};

// A pair of keys, by all parts of it, onto the sums of kRows rows. weights: of this pair, [rows][kParts] kTilePairs apart.
template <class T, int kRows, int kVecs, int kPart = 0>
inline __attribute__((always_inline)) void add_pair(const float* weights, const Vec (&values)[kVecs],
                                                    Vec (&sums)[kRows][kVecs]) {
  using O = Operands<T>;
  Vec own[kVecs];
  for (int j = 0; j < kVecs; ++j) own[j] = O::template part<kPart>(values[j]);
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    const Vec x = set1(weights[(i * O::kParts + kPart) * kTilePairs]);
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) sums[i][j] = O::multiply_add(x, own[j], sums[i][j]);
  }
  if constexpr (kPart + 1 < O::kParts) add_pair<T, kRows, kVecs, kPart + 1>(weights, values, sums);
}

// record = factor * record + sum over pairs [begin, end) of weights times values, in kSteps times 32 columns from d on.
// (Not to be inlined: beside other code, GCC keeps sums in memory.)
template <class T, int kRows, int kSteps, class Values>
__attribute__((noinline)) void weigh_pairs_tile(const float* weights, const Values& values, int begin, int end,
                                                int64_t d, const float* factors, float* records, int64_t stride) {
  constexpr int kVecs = 2 * kSteps;
  Vec sums[kRows][kVecs];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) sums[i][j] = mul(load(records + i * stride + d + j * kLanes), set1(factors[i]));
  for (int pair = begin; pair < end; ++pair) {
    Vec v[kVecs];
    for (int s = 0; s < kSteps; ++s) values.take(pair, d + s * PairOrder::kStep, v + 2 * s);
    add_pair<T, kRows, kVecs>(weights + pair, v, sums);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) store(records + i * stride + d + j * kLanes, sums[i][j]);
}

// The same for any number of rows up to kRows, and all columns.
template <class T, int kRows = kPairRows, class Values>
inline void weigh_pairs(int rows, const float* weights, const Values& values, int begin, int end, const float* factors,
                        float* records, const RecordLayout& layout) {
  if constexpr (kRows > 1)
    if (rows < kRows) return weigh_pairs<T, kRows - 1>(rows, weights, values, begin, end, factors, records, layout);
  int64_t d = 0;
  if constexpr (kRows <= kPairRows / 2)
    for (; d + 2 * PairOrder::kStep <= layout.width; d += 2 * PairOrder::kStep)
      weigh_pairs_tile<T, kRows, 2>(weights, values, begin, end, d, factors, records, layout.size());
  for (; d < layout.width; d += PairOrder::kStep)
    weigh_pairs_tile<T, kRows, 1>(weights, values, begin, end, d, factors, records, layout.size());
}

// T: of queries, bf16 or SplitPairs. S: of the cache's rows, bf16 or int8_t.
template <class T, class S>
class PairTiles {
  using O = Operands<T>;

 public:
  using Order = PairOrder;

  static int64_t floats(const AttentionArgs& args, const RecordLayout& layout, int64_t heads, int64_t rows) {
    return heads * rows * q_stride(args.head_dim) + kKeyTile * turned_units<T>(args.head_dim) +
           kTilePairs * layout.width + kPairRows * (kKeyTile + O::kParts * kTilePairs);
  }
  PairTiles(float* memory, const ItemRows& rows, const RecordLayout& layout)
      : args_(rows.args), rows_(rows), layout_(layout), units_(turned_units<T>(args_.head_dim)), queries_(memory),
        keys_(queries_ + rows.item.kv_heads * rows.count * q_stride(args_.head_dim)),
        values_(keys_ + kKeyTile * units_), scores_(values_ + kTilePairs * layout.width),
        weights_(scores_ + kPairRows * kKeyTile) {}

  void begin() {}
  void end() {}
  void take_query(int64_t head, int64_t i, const bf16* row) {
    pack_query(static_cast<const T*>(row), args_.head_dim, query(head, i));
  }

  // The tile's keys from position `first` on, for all rows of a head; then: what is asked for meanwhile.
  void run(int64_t head, int64_t first, const TileRows<S>& tile, const Ahead<S>& then, float* records) {
    const HeadRows<S> keys{tile.keys, rows_.key_offset(head)}, values{tile.values, rows_.value_offset(head)};
    scales_.take(args_, keys, values, tile.seen);
    if (rows_.count <= kCachedRows)
      score_few(head, keys, then, tile.seen);
    else
      turn_keys<T>(keys, then, tile.seen, args_.head_dim, keys_);
    const CachedPairs<S> cached{values, then.while_weighed, tile.seen, args_.value_dim};
    const TileRange all = in_tile(rows_.shared, first);
    const bool same = all.begin == tile.seen.begin && all.end == tile.seen.end;
    // Packing pays when several row tiles share its result.
    if (rows_.count <= kPairRows) return run_rows(head, first, tile.seen, same, same, cached, records);
    for (int pair = tile.seen.begin / 2; pair < (tile.seen.end + 1) / 2; ++pair)
      for (int64_t d = 0; d < layout_.width; d += PairOrder::kStep) {
        Vec packed[2];
        cached.take(pair, d, packed);
        store(values_ + pair * layout_.width + d, packed[0]);
        store(values_ + pair * layout_.width + d + kLanes, packed[1]);
      }
    const bool together = same || finite_values(tile.seen);
    run_rows(head, first, tile.seen, same, together, PackedPairs{values_, layout_.width}, records);
  }

 private:
  static int64_t q_stride(int64_t head_dim) { return (head_dim + O::kStep - 1) / O::kStep * O::kParts * kLanes; }
  float* query(int64_t head, int64_t i) const { return queries_ + (head * rows_.count + i) * q_stride(args_.head_dim); }

  template <int kRows = kCachedRows>
  void score_few(int64_t head, const HeadRows<S>& keys, const Ahead<S>& ahead, TileRange wanted) {
    if constexpr (kRows > 1)
      if (rows_.count < kRows) return score_few<kRows - 1>(head, keys, ahead, wanted);
    for (int i = wanted.first_of_register(); i < wanted.end; i += kLanes)
      score_cached<T, kRows>(query(head, 0), q_stride(args_.head_dim), keys.from(i), ahead.while_scored[i / kLanes],
                             args_.head_dim, set1(args_.scale), scores_ + i);
  }

  bool finite_values(TileRange seen) const {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 others = 0;
    const float* end = values_ + (seen.end + 1) / 2 * layout_.width;
    for (const float* at = values_ + seen.begin / 2 * layout_.width; at < end; at += kLanes)
      others |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_castps_si512(load(at).v), exponent), exponent);
    return !others;
  }

  // same: all rows see what any sees. together: they may be weighed with all of it.
  template <class Values>
  void run_rows(int64_t head, int64_t first, TileRange seen, bool same, bool together, const Values& values,
                float* records) {
    const bool plain = same && seen.begin == 0 && seen.end == kKeyTile && !rows_.changes && sizeof(S) == sizeof(bf16);
    const int64_t tiles = (rows_.count + kPairRows - 1) / kPairRows;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = rows_.count * t / tiles;
      const int count = static_cast<int>(rows_.count * (t + 1) / tiles - row);
      TileRange ranges[kPairRows];
      for (int i = 0; i < count; ++i) ranges[i] = same ? seen : in_tile(rows_.seen(row + i), first);
      const TileRange any{ranges[0].begin, ranges[count - 1].end};  // rows are in the order of their tokens
      if (any.begin >= any.end) continue;
      if (rows_.count > kCachedRows) score_many(query(head, row), count, any);
      if (!plain) finish_scores(head, first, row, count, ranges, any);
      float factors[kLanes];
      float* record = records + row * layout_.size();
      soften(count, any, record, factors);
      if constexpr (sizeof(S) == 1) round_weights(count, ranges, any);
      const int begin = any.begin / 2, end = (any.end + 1) / 2;
      if (together)
        weigh_pairs<T>(count, weights_, values, begin, end, factors, record, layout_);
      else
        weigh_apart(count, values, ranges, factors, record);
    }
  }

  // Registers of a tile, in pairs, of which one is seen.
  static int first_of(TileRange any) { return any.begin / kTurnedKeys * kTurnedKeys; }
  static int end_of(TileRange any) { return (any.end + kTurnedKeys - 1) / kTurnedKeys * kTurnedKeys; }

  void score_many(const float* q, int count, TileRange any) {
    const int64_t stride = q_stride(args_.head_dim);
    for (int i = 0; i < count; i += kTurnedRows, q += kTurnedRows * stride)
      for (int key = first_of(any); key < end_of(any); key += kTurnedKeys)
        score_turned<T>(count - i < kTurnedRows ? count - i : kTurnedRows, q, stride, keys_ + key * units_, units_,
                        set1(args_.scale), scores_ + i * kKeyTile + key);
  }

  // All that is done to scores before the softmax where they are more than products of keys that all rows see.
  void finish_scores(int64_t head, int64_t first, int64_t row, int count, const TileRange* seen, TileRange any) {
    scales_.scale_scores(count, scores_, any);
    for (int i = 0; i < count; ++i) {
      float* scores = scores_ + i * kKeyTile;
      if (rows_.changes)
        change_scores(args_, rows_.query_head(head, row + i), first - rows_.position(row + i), seen[i], scores);
      const uint64_t mask = mask_of(seen[i]);
      for (int key = first_of(any); key < end_of(any); key += kLanes)
        _mm512_mask_storeu_ps(scores + key, static_cast<__mmask16>(~mask >> key), set1(-infinity()).v);
    }
  }

  // Scores become weights; factors: what each row's record is worth now.
  void soften(int count, TileRange any, float* records, float* factors) {
    float before[kLanes], now[kLanes];
    for (int i = 0; i < kLanes; ++i) before[i] = i < count ? layout_.greatest(records + i * layout_.size()) : 0.0f;
    const Vec greatest = max(greatest_scores(count, any), load(before));
    const __mmask16 none = _mm512_cmpeq_ps_mask(greatest.v, set1(-infinity()).v);
    const Vec base{_mm512_mask_blend_ps(none, greatest.v, zero().v)};
    store(factors, exp(sub(load(before), base)));
    store(now, greatest);
    for (int i = 0; i < count; ++i) layout_.greatest(records + i * layout_.size()) = now[i];
    store(now, base);
    for (int i = 0; i < count; ++i)
      make_weights(i, any, now[i], factors[i], layout_.sums(records + i * layout_.size()));
  }

  // Of each row; lanes of no row have any number.
  Vec greatest_scores(int count, TileRange any) const {
    Vec most[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const float* scores = scores_ + (i < count ? i : 0) * kKeyTile;
      most[i] = set1(-infinity());
      if (i < count)
        for (int key = first_of(any); key < end_of(any); key += kLanes) most[i] = max(load(scores + key), most[i]);
    }
    if (count > kCachedRows) return greatest_of_each(most);
    float greatest[kLanes] = {};
    for (int i = 0; i < count; ++i) greatest[i] = reduce_max(most[i]);
    return load(greatest);
  }

  void make_weights(int i, TileRange any, float greatest, float factor, float* sums) {
    float* scores = scores_ + i * kKeyTile;
    const Vec base = set1(greatest), log2_e = set1(1.44269504f);
    Vec sum = mul(load(sums), set1(factor));
    for (int key = first_of(any); key < end_of(any); key += kTurnedKeys) {
      const Vec a = power_of_two(mul(sub(load(scores + key), base), log2_e));
      const Vec b = power_of_two(mul(sub(load(scores + key + kLanes), base), log2_e));
      if constexpr (sizeof(S) == 1) {
        store(scores + key, a);
        store(scores + key + kLanes, b);
        sum = add(add(sum, a), b);
      } else {
        sum = add_weights(put_weights(i, key, a, b), sum);
      }
    }
    store(sums, sum);
  }
  Vec put_weights(int i, int key, Vec a, Vec b) {
    const Vec pairs{_mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(b.v, a.v))};
    put_parts<T>(pairs, weights_ + i * O::kParts * kTilePairs + key / 2, kTilePairs);
    return pairs;
  }
  template <int kPart = 0>
  static Vec add_weights(Vec pairs, Vec sum) {
    const Vec ones{_mm512_castsi512_ps(_mm512_set1_epi32(0x3f803f80))};
    sum = O::multiply_add(O::template part<kPart>(pairs), O::template part<kPart>(ones), sum);
    if constexpr (kPart + 1 < O::kParts) return add_weights<kPart + 1>(pairs, sum);
    return sum;
  }

  // What a row does not see stays 0 whatever its scale.
  void round_weights(int count, const TileRange* seen, TileRange any) {
    scales_.scale_weights(count, scores_, any);
    for (int i = 0; i < count; ++i)
      for (int key = first_of(any); key < end_of(any); key += kTurnedKeys) {
        const uint64_t mask = mask_of(seen[i]) >> key;
        const float* weights = scores_ + i * kKeyTile + key;
        put_weights(i, key, {_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), weights)},
                    {_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> kLanes), weights + kLanes)});
      }
  }

  template <class Values>
  void weigh_apart(int count, const Values& values, const TileRange* seen, const float* factors, float* records) {
    for (int i = 0; i < count; ++i)
      weigh_pairs<T, 1>(1, weights_ + i * O::kParts * kTilePairs, SeenPairs<Values>{values, seen[i]}, seen[i].begin / 2,
                        (seen[i].end + 1) / 2, factors + i, records + i * layout_.size(), layout_);
  }

  const AttentionArgs& args_;
  const ItemRows& rows_;
  const RecordLayout& layout_;
  const int64_t units_;   // of a key
  float* const queries_;  // [heads][rows][q_stride]
  float* const keys_;     // turned
  float* const values_;   // [kTilePairs][width]
  float* const scores_;   // [kPairRows][kKeyTile]
  float* const weights_;  // [kPairRows][kParts][kTilePairs]
  TileScales<S> scales_;
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

#endif
