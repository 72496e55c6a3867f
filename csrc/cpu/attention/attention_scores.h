// The scores of an item's rows against a tile of keys: by vector registers, or by AMX for bf16.
//
// Either has: floats(heads, rows, head_dim), its memory; take_query(head, i, row); take_keys(head, keys, ahead,
// wanted), which also asks for the keys ahead; rows(head, first, count, wanted), scores [count][kKeyTile] against the
// wanted ones of the keys that were taken last, for this head, in memory that the caller may change until the next
// call. Of sixteen keys, of which one is wanted, all may be read.
#pragma once

#include "cpu/attention/attention_rows.h"
#include "cpu/common/tiles.h"

namespace quire {
namespace QUIRE_ISA {

template <class T>
class VectorScores {
 public:
  static int64_t floats(int64_t heads, int64_t rows, int64_t head_dim) {
    return heads * rows * q_stride(head_dim) + kKeyTile / kLanes * group_size(head_dim) + kRowTile * kKeyTile;
  }
  VectorScores(float* memory, int64_t heads, int64_t rows, int64_t head_dim, float scale)
      : head_dim_(head_dim), rows_(rows), scale_(scale), queries_(memory),
        keys_(queries_ + heads * rows * q_stride(head_dim)), scores_(keys_ + kKeyTile / kLanes * group_size(head_dim)) {
  }

  void begin() {}
  void end() {}
  void take_query(int64_t head, int64_t i, const T* row) { pack_query(row, head_dim_, query(head, i)); }
  template <class S>
  void take_keys(int64_t, const HeadRows<S>& keys, const HeadRows<S>& ahead, TileRange wanted) {
    for (int i = wanted.first_of_register(); i < wanted.end; i += kLanes)
      pack_keys<T>(keys.from(i), ahead.from(i), head_dim_, keys_ + i / kLanes * group_size(head_dim_));
  }
  float* rows(int64_t head, int64_t first, int count, TileRange wanted) {
    const int64_t stride = q_stride(head_dim_), quads = quad_count<T>(head_dim_);
    for (int key = wanted.first_of_register(); key < wanted.end; key += kLanes)
      score<T>(count, query(head, first), stride, keys_ + key / kLanes * group_size(head_dim_), quads, set1(scale_),
               scores_ + key);
    return scores_;
  }

 private:
  static int64_t q_stride(int64_t head_dim) {
    constexpr int kStep = Operands<T>::kStep;
    return (head_dim + kStep - 1) / kStep * Operands<T>::kParts * kLanes;
  }
  float* query(int64_t head, int64_t i) const { return queries_ + (head * rows_ + i) * q_stride(head_dim_); }
  static int64_t group_size(int64_t head_dim) { return quad_count<T>(head_dim) * 4 * kLanes; }  // of sixteen keys

  const int64_t head_dim_, rows_;
  const float scale_;
  float* const queries_;  // [heads][rows][q_stride]
  float* const keys_;     // [kKeyTile / 16][quads][4][16]
  float* const scores_;   // [kRowTile][kKeyTile]
};

#if defined(__AMX_BF16__)

// As bf16, in which they are exact.
inline __m512i load_features(const int8_t* p, int64_t count) {
  const Vec units = count >= kTileFeatures ? Units<bf16>::load(p) : Units<bf16>::load(p, static_cast<int>(count));
  return _mm512_castps_si512(units.v);
}

// Keys are rows as they lie, only brought together; queries are turned into columns, sixteen at a time, and all rows'
// scores are made at once.
class MatrixScores {
 public:
  static int64_t floats(int64_t heads, int64_t rows, int64_t head_dim) {
    return heads * groups(rows) * steps(head_dim) * kTileElements / 2 + kKeyTile * steps(head_dim) * kTileFeatures / 2 +
           groups(rows) * kTileSide * kKeyTile;
  }
  MatrixScores(float* memory, int64_t heads, int64_t rows, int64_t head_dim, float scale)
      : head_dim_(head_dim), rows_(rows), steps_(steps(head_dim)), scale_(scale),
        columns_(rows < kTileSide ? static_cast<int>(rows) : kTileSide), queries_(reinterpret_cast<bf16*>(memory)),
        keys_(queries_ + heads * groups(rows) * steps_ * kTileElements),
        scores_(reinterpret_cast<float*>(keys_ + kKeyTile * steps_ * kTileFeatures)) {}

  void begin() { configure_tiles(columns_); }
  void end() { _tile_release(); }

  void take_query(int64_t head, int64_t i, const bf16* row) {
    // As it lies, into the place of its column; `turn` makes columns once the group is whole.
    bf16* group = queries(head, i / kTileSide);
    for (int64_t s = 0; s < steps_; ++s)
      _mm512_store_si512(group + s * kTileElements + i % kTileSide * kTileFeatures,
                         load_features(row + s * kTileFeatures, head_dim_ - s * kTileFeatures));
    if (i + 1 == rows_ || (i + 1) % kTileSide == 0) turn(group, static_cast<int>(i % kTileSide) + 1);
  }

  template <class S>
  void take_keys(int64_t head, const HeadRows<S>& keys, const HeadRows<S>& ahead, TileRange wanted) {
    const int64_t width = steps_ * kTileFeatures;
    const int whole = (wanted.end + kTileSide - 1) / kTileSide * kTileSide;
    for (int i = 0; i < whole; ++i)
      for (int64_t d = 0; d < head_dim_; d += kTileFeatures) {
        _mm512_store_si512(keys_ + i * width + d, load_features(keys.at(i) + d, head_dim_ - d));
        prefetch(ahead.at(i) + d);
      }
    before_tiles_read(keys_);
    for (int64_t group = 0; group < groups(rows_); ++group) multiply(head, group, whole / kTileSide);
  }

  float* rows(int64_t, int64_t first, int, TileRange) { return scores_ + first * kKeyTile; }

 private:
  static int64_t groups(int64_t rows) { return (rows + kTileSide - 1) / kTileSide; }
  bf16* queries(int64_t head, int64_t group) const {
    return queries_ + (head * groups(rows_) + group) * steps_ * kTileElements;
  }
  static int64_t steps(int64_t head_dim) { return (head_dim + kTileFeatures - 1) / kTileFeatures; }

  void turn(bf16* group, int count) {
    for (int64_t s = 0; s < steps_; ++s, group += kTileElements) {
      Vec rows[kTileSide];
      for (int i = 0; i < kTileSide; ++i)
        rows[i] = i < count ? as_floats(_mm512_load_si512(group + i * kTileFeatures)) : zero();
      transpose(rows);
      for (int i = 0; i < kTilePairs; ++i)
        store_first(reinterpret_cast<float*>(group + 2 * i * columns_), rows[i], columns_);
    }
    before_tiles_read(queries_);
  }

  // A group's scores against `tiles` times sixteen keys.
  void multiply(int64_t head, int64_t group, int tiles) {
    const bf16* query = queries(head, group);
    const int64_t key_bytes = steps_ * kTileFeatures * sizeof(bf16), next = kTileSide * steps_ * kTileFeatures;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t s = 0; s < steps_; ++s, query += kTileElements) {
      const bf16* keys = keys_ + s * kTileFeatures;
      _tile_loadd(6, query, 4 * columns_);
      _tile_loadd(4, keys, key_bytes);
      _tile_dpbf16ps(0, 4, 6);
      if (tiles > 1) {
        _tile_loadd(5, keys + next, key_bytes);
        _tile_dpbf16ps(1, 5, 6);
      }
      if (tiles > 2) {
        _tile_loadd(4, keys + 2 * next, key_bytes);
        _tile_dpbf16ps(2, 4, 6);
      }
      if (tiles > 3) {
        _tile_loadd(5, keys + 3 * next, key_bytes);
        _tile_dpbf16ps(3, 5, 6);
      }
    }
    put<0>(group);
    if (tiles > 1) put<1>(group);
    if (tiles > 2) put<2>(group);
    if (tiles > 3) put<3>(group);
  }

  template <int kSums>
  void put(int64_t group) {
    Vec by_row[kTileSide];
    take_sums<kSums>(by_row);
    float* scores = scores_ + group * kTileSide * kKeyTile + kSums * kTileSide;
    for (int i = 0; i < columns_; ++i) store(scores + i * kKeyTile, mul(by_row[i], set1(scale_)));
  }

  const int64_t head_dim_, rows_, steps_;
  const float scale_;
  const int columns_;
  bf16* const queries_;  // [heads][groups][steps][16 pairs][columns][2]
  bf16* const keys_;     // [kKeyTile][steps][32]
  float* const scores_;  // [groups][16][kKeyTile]
};
static_assert(kKeyTile == 4 * kTileSide, "as many tiles of sums as there are");

#endif

template <class T>
struct ScoresOf {
  using Type = VectorScores<T>;
};
#if defined(__AMX_BF16__)
template <>
struct ScoresOf<bf16> {
  using Type = MatrixScores;
};
#endif

}  // namespace QUIRE_ISA
}  // namespace quire
