// The scores of an item's rows against a tile of keys, by vector registers.
//
// It has: floats(heads, rows, head_dim), its memory; take_query(head, i, row); take_keys(head, keys, ahead,
// wanted), which also asks for what is ahead; rows(head, first, count, wanted), scores [count][kKeyTile] against the
// wanted ones of the keys that were taken last, for this head, in memory that the caller may change until the next
// call. Of sixteen keys, of which one is wanted, all may be read.
#pragma once

#include "cpu/attention/attention_rows.h"
#include "cpu/attention/attention_turned.h"

namespace quire {
namespace QUIRE_ISA {

template <class T>
class VectorScores {
 public:
  static int64_t floats(int64_t heads, int64_t rows, int64_t head_dim) {
    return heads * rows * q_stride(head_dim) + keys_size(head_dim) + kRowTile * kKeyTile;
  }
  VectorScores(float* memory, int64_t heads, int64_t rows, int64_t head_dim, float scale)
      : head_dim_(head_dim), rows_(rows), scale_(scale), queries_(memory),
        keys_(queries_ + heads * rows * q_stride(head_dim)), scores_(keys_ + keys_size(head_dim)) {}

  void begin() {}
  void end() {}
  void take_query(int64_t head, int64_t i, const T* row) { pack_query(row, head_dim_, query(head, i)); }
  template <class S>
  void take_keys(int64_t head, const HeadRows<S>& keys, const Ahead<S>& ahead, TileRange wanted) {
    if (rows_ <= kCachedRows) return score_few(head, keys, ahead, wanted);
#if defined(__AVX512F__)
    turn_keys<T>(keys, ahead, wanted, head_dim_, keys_);
#else
    for (int i = wanted.first_of_register(); i < wanted.end; i += kLanes)
      pack_keys<T>(keys.from(i), ahead.while_scored[i / kLanes], head_dim_, keys_ + i / kLanes * group_size(head_dim_));
#endif
  }
  float* rows(int64_t head, int64_t first, int count, TileRange wanted) {
    if (rows_ <= kCachedRows) return scores_;
    const int64_t stride = q_stride(head_dim_);
#if defined(__AVX512F__)
    const int64_t units = turned_units<T>(head_dim_);
    for (int key = wanted.begin / kTurnedKeys * kTurnedKeys; key < wanted.end; key += kTurnedKeys)
      score_turned<T>(count, query(head, first), stride, keys_ + key * units, units, set1(scale_), scores_ + key);
#else
    const int64_t quads = quad_count<T>(head_dim_);
    for (int key = wanted.first_of_register(); key < wanted.end; key += kLanes)
      score<T>(count, query(head, first), stride, keys_ + key / kLanes * group_size(head_dim_), quads, set1(scale_),
               scores_ + key);
#endif
    return scores_;
  }

 private:
  template <class S, int kRows = kCachedRows>
  void score_few(int64_t head, const HeadRows<S>& keys, const Ahead<S>& ahead, TileRange wanted) {
    if constexpr (kRows > 1)
      if (rows_ < kRows) return score_few<S, kRows - 1>(head, keys, ahead, wanted);
    for (int i = wanted.first_of_register(); i < wanted.end; i += kLanes)
      score_cached<T, kRows>(query(head, 0), q_stride(head_dim_), keys.from(i), ahead.while_scored[i / kLanes],
                             head_dim_, set1(scale_), scores_ + i);
  }

  static int64_t q_stride(int64_t head_dim) {
    constexpr int kStep = Operands<T>::kStep;
    return (head_dim + kStep - 1) / kStep * Operands<T>::kParts * kLanes;
  }
  float* query(int64_t head, int64_t i) const { return queries_ + (head * rows_ + i) * q_stride(head_dim_); }
  static int64_t group_size(int64_t head_dim) { return quad_count<T>(head_dim) * 4 * kLanes; }  // of sixteen keys
  static int64_t keys_size(int64_t head_dim) {
    return kKeyTile / kLanes * group_size(head_dim);
  }  // turned ones need no more

  const int64_t head_dim_, rows_;
  const float scale_;
  float* const queries_;  // [heads][rows][q_stride]
  float* const keys_;     // [kKeyTile / 16][quads][4][16], or turned
  float* const scores_;   // [kRowTile][kKeyTile]
};

}  // namespace QUIRE_ISA
}  // namespace quire
