// A key tile's work on AMX (tiles.h), for rows of bf16.
//
// A row's chain of operations is the same whatever is computed beside it, and whichever of the two factors is which:
//  * A score is the sum of a tile over the features, 32 at a time, then times the scale.
//  * Weights are relative to the greatest score so far (base 2, power_of_two) and rounded to bf16.
//  * A record is multiplied by its factor; then the tile adds the weighted values of the first 32 keys of sixty-four,
//    then those of the others, and by a column of ones the weights as they were rounded, which the end divides by. (With
//    rows of int8, weights are added up before they are scaled and rounded, in kLanes parts.)
// Keys that a row does not see have a weight of 0, and values that none sees are zeros. Where a row could meet a value that
// it does not see and that is no finite number, each row is multiplied apart with what it sees.
#pragma once

#if defined(__AMX_BF16__)

#include "cpu/attention/attention_item.h"
#include "cpu/attention/attention_scales.h"
#include "cpu/attention/attention_tiles.h"
#include "cpu/attention/attention_weights.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

// S: of the cache's rows, bf16 or int8_t. Sixteen rows are a group. Where there are no more, keys are multiplied as they
// lie by queries turned into columns; where there are, keys are turned, once for all groups.
template <class S>
class MatrixTiles {
 public:
  using Order = PairOrder;

  static int64_t floats(const AttentionArgs& args, const RecordLayout& layout, int64_t heads, int64_t rows) {
    const int64_t queries = heads * groups(rows) * steps(args.head_dim) * kTileElements;
    const int64_t keys = kKeyTile * steps(args.head_dim) * kTileFeatures;
    const int64_t values = kKeyTile * (layout.width + kLanes);
    return (queries + keys + values + kTileSide * kKeyTile) / 2 + kTileSide * (kKeyTile + layout.size());
  }
  MatrixTiles(float* memory, const ItemRows& rows, const RecordLayout& layout)
      : args_(rows.args), rows_(rows), layout_(layout), steps_(steps(args_.head_dim)),
        columns_(layout.width / kTileSide), many_(rows.count > kTileSide),
        side_(many_ ? kTileSide : static_cast<int>(rows.count)), queries_(reinterpret_cast<bf16*>(memory)),
        keys_(queries_ + rows.item.kv_heads * groups(rows.count) * steps_ * kTileElements),
        values_(keys_ + kKeyTile * steps_ * kTileFeatures), weights_(values_ + kKeyTile * (layout.width + kLanes)),
        scores_(reinterpret_cast<float*>(weights_ + kTileSide * kKeyTile)), spare_(scores_ + kTileSide * kKeyTile) {
    for (int half = 0; half < 2; ++half)
      for (int pair = 0; pair < kTilePairs; ++pair)
        _mm512_store_si512(values(half, columns_) + pair * kTileFeatures,
                           _mm512_zextsi128_si512(_mm_cvtsi32_si128(0x3f803f80)));
  }

  // Tiles: 0 scores; 1 and 6 weights of 32 keys; 2 queries; 3 and 7 keys or values; 4 and 5 records.
  void begin() {
    const uint8_t rows = static_cast<uint8_t>(side_);
    const uint16_t columns = static_cast<uint16_t>(4 * side_);
    configure_tiles({{16, rows, 16, 16, rows, rows, rows, 16}, {columns, 64, columns, 64, 64, 64, 64, 64}});
  }
  void end() { _tile_release(); }

  void take_query(int64_t head, int64_t i, const bf16* row) {
    bf16* group = queries(head, i / kTileSide);
    for (int64_t s = 0; s < steps_; ++s)
      _mm512_store_si512(group + s * kTileElements + i % kTileSide * kTileFeatures,
                         load_features(row + s * kTileFeatures, args_.head_dim - s * kTileFeatures));
    if (!many_ && i + 1 == rows_.count) turn_queries(group);
  }

  // The tile's keys from position `first` on, for all rows of a head; then: what is asked for meanwhile.
  void run(int64_t head, int64_t first, const TileRows<S>& tile, const Ahead<S>& then, float* records) {
    const HeadRows<S> keys{tile.keys, rows_.key_offset(head)}, values{tile.values, rows_.value_offset(head)};
    many_ ? turn_keys(keys, then, tile.seen) : copy_keys(keys, then, tile.seen);
    scales_.take(args_, keys, values, tile.seen);
    take_values(values, then, tile.seen);
    const TileRange all = in_tile(rows_.shared, first);
    const bool same = all.begin == tile.seen.begin && all.end == tile.seen.end;
    const bool plain = same && !all.begin && all.end == kKeyTile && !rows_.changes && sizeof(S) == sizeof(bf16);
    const bool apart = !same && !finite_values(halves_of(tile.seen));
    for (int64_t row = 0; row < rows_.count; row += kTileSide, records += kTileSide * layout_.size()) {
      const int count = static_cast<int>(rows_.count - row < kTileSide ? rows_.count - row : kTileSide);
      TileRange seen[kTileSide];
      for (int i = 0; i < count; ++i) seen[i] = same ? all : in_tile(rows_.seen(row + i), first);
      const TileRange any{seen[0].begin, seen[count - 1].end};  // rows are in the order of their tokens
      if (any.begin >= any.end) continue;
      const int halves = halves_of(any);
      many_ ? score_many(queries(head, row / kTileSide), halves) : score_few(queries(head, 0), halves);
      if (!plain) finish_scores(head, first, row, count, seen, any);
      soften(count, halves, plain ? args_.scale : 1.0f, seen, any, records);
      apart ? weigh_apart(count, values, seen, records) : weigh(count, halves, records);
    }
  }

 private:
  static int64_t groups(int64_t rows) { return (rows + kTileSide - 1) / kTileSide; }
  static int64_t steps(int64_t head_dim) { return (head_dim + kTileFeatures - 1) / kTileFeatures; }
  static int halves_of(TileRange seen) { return (seen.end + kTileFeatures - 1) / kTileFeatures; }
  bf16* queries(int64_t head, int64_t group) const {
    return queries_ + (head * groups(rows_.count) + group) * steps_ * kTileElements;
  }
  bf16* values(int64_t half, int64_t column) const {
    return values_ + (half * (columns_ + 1) + column) * kTileElements;
  }

  void turn_queries(bf16* group) {
    for (int64_t s = 0; s < steps_; ++s, group += kTileElements) {
      Vec rows[kTileSide];
      for (int i = 0; i < kTileSide; ++i)
        rows[i] = i < side_ ? as_floats(_mm512_load_si512(group + i * kTileFeatures)) : zero();
      transpose(rows);
      for (int i = 0; i < kTilePairs; ++i) store_first(reinterpret_cast<float*>(group + 2 * i * side_), rows[i], side_);
    }
  }

  // [kKeyTile][steps][32]
  void copy_keys(const HeadRows<S>& keys, const Ahead<S>& then, TileRange wanted) {
    for (int i = 0; i < kTileFeatures * halves_of(wanted); ++i) {
      const S *row = keys.at(i), *next = then.while_scored[i / kLanes].at(i % kLanes);
      for (int64_t s = 0; s < steps_; ++s) {
        const int64_t d = s * kTileFeatures;
        _mm512_store_si512(keys_ + i * steps_ * kTileFeatures + d, load_features(row + d, args_.head_dim - d));
        prefetch(next + d);
      }
    }
  }

  // [kKeyTile / 16][steps][16 pairs][16 keys][2]
  void turn_keys(const HeadRows<S>& keys, const Ahead<S>& then, TileRange wanted) {
    for (int part = 0; part < 2 * halves_of(wanted); ++part)
      for (int64_t s = 0; s < steps_; ++s) {
        const int64_t d = s * kTileFeatures;
        Vec rows[kTileSide];
        for (int i = 0; i < kTileSide; ++i) {
          rows[i] = as_floats(load_features(keys.at(part * kTileSide + i) + d, args_.head_dim - d));
          prefetch(then.while_scored[part].at(i) + d);
        }
        transpose(rows);
        bf16* to = keys_ + (part * steps_ + s) * kTileElements;
        for (int i = 0; i < kTilePairs; ++i) store(reinterpret_cast<float*>(to + i * kTileFeatures), rows[i]);
      }
  }

  // [2 halves][columns of 16, and one of ones][16 pairs of keys][16][2]
  void take_values(const HeadRows<S>& rows, const Ahead<S>& then, TileRange seen) {
    for (int key = 0; key < kTileFeatures * halves_of(seen); key += 2) {
      const bool one = seen.begin <= key && key < seen.end, other = seen.begin <= key + 1 && key + 1 < seen.end;
      const S *row = rows.at(key), *row2 = rows.at(key + 1);
      const HeadRows<S>& next = then.while_weighed[key / kLanes];
      const S *next1 = next.at(key % kLanes), *next2 = next.at(key % kLanes + 1);
      bf16* to = values(key / kTileFeatures, 0) + key % kTileFeatures / 2 * kTileFeatures;
      for (int64_t d = 0; d < layout_.width; d += kTileFeatures, to += 2 * kTileElements) {
        const int64_t left = args_.value_dim - d;
        const __m512i a = one ? load_features(row + d, left) : _mm512_setzero_si512();
        const __m512i b = other ? load_features(row2 + d, left) : _mm512_setzero_si512();
        _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(to + kTileElements, _mm512_unpackhi_epi16(a, b));
        prefetch(next1 + d);
        prefetch(next2 + d);
      }
    }
  }

  bool finite_values(int halves) const {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 others = 0;
    for (int half = 0; half < halves; ++half)
      for (const bf16* at = values(half, 0); at < values(half, columns_); at += kTileFeatures)
        others |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_load_si512(at), exponent), exponent);
    return !others;
  }

  // Of many rows, all tiles are alike: scores may go where nothing else is wanted now.
  void score_many(const bf16* query, int halves) {
    const int64_t next = steps_ * kTileElements;  // sixteen keys on
    const bf16* key = keys_;
    before_tiles_read(keys_);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(4);
    _tile_zero(5);
    for (int64_t s = 0; s < steps_; ++s, query += kTileElements, key += kTileElements) {
      _tile_loadd(2, query, 64);
      _tile_loadd(3, key, 64);
      _tile_dpbf16ps(0, 2, 3);
      _tile_loadd(7, key + next, 64);
      _tile_dpbf16ps(1, 2, 7);
      if (halves == 1) continue;
      _tile_loadd(3, key + 2 * next, 64);
      _tile_dpbf16ps(4, 2, 3);
      _tile_loadd(7, key + 3 * next, 64);
      _tile_dpbf16ps(5, 2, 7);
    }
    constexpr int64_t kStride = kKeyTile * sizeof(float);
    _tile_stored(0, scores_, kStride);
    _tile_stored(1, scores_ + kTileSide, kStride);
    if (halves == 1) return;
    _tile_stored(4, scores_ + 2 * kTileSide, kStride);
    _tile_stored(5, scores_ + 3 * kTileSide, kStride);
  }

  void score_few(const bf16* query, int halves) {
    const int64_t key_bytes = steps_ * kTileFeatures * sizeof(bf16);
    alignas(64) float sums[kTileSide][kTileSide];
    before_tiles_read(keys_);
    for (int part = 0; part < 2 * halves; ++part) {
      _tile_zero(0);
      for (int64_t s = 0; s < steps_; ++s) {
        _tile_loadd(2, query + s * kTileElements, 4 * side_);
        _tile_loadd(3, keys_ + (part * kTileSide * steps_ + s) * kTileFeatures, key_bytes);
        _tile_dpbf16ps(0, 3, 2);
      }
      float* scores = scores_ + part * kTileSide;
      if (side_ == 1) {
        _tile_stored(0, scores, sizeof(float));
      } else if (side_ == 2) {
        _tile_stored(0, sums, 2 * sizeof(float));
        store(scores, evens(load(sums[0]), load(sums[1])));
        store(scores + kKeyTile, odds(load(sums[0]), load(sums[1])));
      } else {
        _tile_stored(0, sums, sizeof sums[0]);
        Vec by_row[kTileSide];
        for (int i = 0; i < kTileSide; ++i) by_row[i] = load(sums[i]);
        transpose(by_row);
        for (int i = 0; i < side_; ++i) store(scores + i * kKeyTile, by_row[i]);
      }
    }
  }

  // All that is done to scores before the softmax where they are more than products of keys that all rows see.
  void finish_scores(int64_t head, int64_t first, int64_t row, int count, const TileRange* seen, TileRange any) {
    const int end = kTileFeatures * halves_of(any);
    for (int i = 0; i < count; ++i)
      for (float* x = scores_ + i * kKeyTile; x < scores_ + i * kKeyTile + end; x += kLanes)
        store(x, mul(load(x), set1(args_.scale)));
    scales_.scale_scores(count, scores_, any);
    for (int i = 0; i < count; ++i) {
      float* scores = scores_ + i * kKeyTile;
      if (rows_.changes)
        change_scores(args_, rows_.query_head(head, row + i), first - rows_.position(row + i), seen[i], scores);
      const uint64_t mask = mask_of(seen[i]);
      for (int key = 0; key < end; key += kLanes)
        _mm512_mask_store_ps(scores + key, static_cast<__mmask16>(~mask >> key), set1(-infinity()).v);
    }
  }

  // Scores become weights; records are made relative to the greatest score.
  void soften(int count, int halves, float scale, const TileRange* seen, TileRange any, float* records) {
    const int64_t size = layout_.size();
    const Vec times = set1(scale);
    Vec most[kLanes];
    float before[kLanes], now[kLanes], factors[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      most[i] = set1(-infinity());
      before[i] = i < count ? layout_.greatest(records + i * size) : 0.0f;
      for (int key = 0; i < count && key < kTileFeatures * halves; key += kLanes)
        most[i] = max(mul(load(scores_ + i * kKeyTile + key), times), most[i]);
    }
    const Vec greatest = max(greatest_of_each(most), load(before));
    const __mmask16 none = _mm512_cmpeq_ps_mask(greatest.v, set1(-infinity()).v);
    const Vec base{_mm512_mask_blend_ps(none, greatest.v, zero().v)};
    store(factors, exp(sub(load(before), base)));
    store(now, greatest);
    for (int i = 0; i < count; ++i) layout_.greatest(records + i * size) = now[i];
    store(now, base);
    for (int i = 0; i < count; ++i) {
      rescale(records + i * size, factors[i]);
      make_weights(i, halves, times, now[i], layout_.sums(records + i * size));
    }
    if constexpr (sizeof(S) == 1) scale_weights(count, halves, seen, any);
  }

  void rescale(float* record, float factor) {
    if (factor == 1.0f) return;  // a product with it is exact
    for (int64_t d = 0; d < layout_.width + kLanes; d += kLanes) store(record + d, mul(load(record + d), set1(factor)));
  }

  void make_weights(int i, int halves, Vec times, float greatest, float* sums) {
    float* scores = scores_ + i * kKeyTile;
    const Vec base = set1(greatest), log2_e = set1(1.44269504f);
    for (int key = 0; key < kTileFeatures * halves; key += kTileFeatures) {
      const Vec a = power_of_two(mul(sub(mul(load(scores + key), times), base), log2_e));
      const Vec b = power_of_two(mul(sub(mul(load(scores + key + kLanes), times), base), log2_e));
      if constexpr (sizeof(S) == 1) {
        store(scores + key, a);
        store(scores + key + kLanes, b);
        store(sums, add(add(load(sums), a), b));
      } else {
        put_weights(i, key, a, b);
      }
    }
  }
  void put_weights(int i, int key, Vec a, Vec b) {
    _mm512_store_si512(weights_ + i * kKeyTile + key, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v));
  }

  // What a row does not see stays 0 whatever its scale.
  void scale_weights(int count, int halves, const TileRange* seen, TileRange any) {
    scales_.scale_weights(count, scores_, any);
    for (int i = 0; i < count; ++i)
      for (int key = 0; key < kTileFeatures * halves; key += kTileFeatures) {
        const uint64_t mask = mask_of(seen[i]) >> key;
        const float* weights = scores_ + i * kKeyTile + key;
        put_weights(i, key, {_mm512_maskz_load_ps(static_cast<__mmask16>(mask), weights)},
                    {_mm512_maskz_load_ps(static_cast<__mmask16>(mask >> kLanes), weights + kLanes)});
      }
  }

  // Rows that are fewer than the tiles' are multiplied elsewhere.
  void weigh(int count, int halves, float* records) {
    if (count == side_) return multiply(halves, records);
    const int64_t bytes = count * layout_.size() * sizeof(float);
    __builtin_memcpy(spare_, records, bytes);
    multiply(halves, spare_);
    __builtin_memcpy(records, spare_, bytes);
  }

  void weigh_apart(int count, const HeadRows<S>& values, const TileRange* seen, float* records) {
    const int64_t size = layout_.size();
    Ahead<S> same;
    for (int i = 0; i < Ahead<S>::kParts; ++i) same.while_scored[i] = same.while_weighed[i] = values.from(i * kLanes);
    for (int i = 0; i < count; ++i) {
      if (seen[i].empty()) continue;
      take_values(values, same, seen[i]);
      __builtin_memcpy(spare_ + i * size, records + i * size, size * sizeof(float));
      multiply(halves_of(seen[i]), spare_);
      __builtin_memcpy(records + i * size, spare_ + i * size, size * sizeof(float));
    }
  }

  // records [side][size] += weights [side][keys] times values, a column of sixteen after the other.
  void multiply(int halves, float* records) {
    const int64_t columns = columns_ + (sizeof(S) == sizeof(bf16)), stride = layout_.size() * sizeof(float);
    before_tiles_read(records);
    _tile_loadd(6, weights_, kKeyTile * sizeof(bf16));
    if (halves > 1) _tile_loadd(1, weights_ + kTileFeatures, kKeyTile * sizeof(bf16));
    for (int64_t c = 0; c < columns; c += 2) {
      const bool two = c + 1 < columns;
      float* at = records + c * kTileSide;
      _tile_loadd(4, at, stride);
      _tile_loadd(3, values(0, c), 64);
      _tile_dpbf16ps(4, 6, 3);
      if (two) {
        _tile_loadd(5, at + kTileSide, stride);
        _tile_loadd(7, values(0, c + 1), 64);
        _tile_dpbf16ps(5, 6, 7);
      }
      if (halves > 1) {
        _tile_loadd(3, values(1, c), 64);
        _tile_dpbf16ps(4, 1, 3);
        if (two) {
          _tile_loadd(7, values(1, c + 1), 64);
          _tile_dpbf16ps(5, 1, 7);
        }
      }
      _tile_stored(4, at, stride);
      if (two) _tile_stored(5, at + kTileSide, stride);
    }
  }

  const AttentionArgs& args_;
  const ItemRows& rows_;
  const RecordLayout& layout_;
  const int64_t steps_, columns_;  // of 32 features; of 16 values
  const bool many_;                // more than a group
  const int side_;                 // rows of a group
  bf16* const queries_;            // [heads][groups][steps][16][32], of few rows [heads][steps][16 pairs][rows][2]
  bf16* const keys_;
  bf16* const values_;
  bf16* const weights_;  // [16][kKeyTile]
  float* const scores_;  // [16][kKeyTile]
  float* const spare_;   // [16] records
  TileScales<S> scales_;
};
static_assert(kKeyTile == 2 * kTileFeatures && kKeyTile == 64, "two products a tile, masks of 64 bits");

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

#endif
