// What rows of int8 are multiplied by. A row's numbers are whole and go into the products as they are; a key's scale
// is a factor of its scores, a value's one of its weights, once the softmax has added these up.
#pragma once

#include "cpu/attention/attention_rows.h"

namespace quire {
namespace QUIRE_ISA {

// Of one tile and head. Rows of floats have none.
template <class S>
struct TileScales {
  void take(const AttentionArgs&, HeadRows<S>, HeadRows<S>, TileRange) {}
  void scale_scores(int, float*, TileRange) const {}
  void scale_weights(int, float*, TileRange) const {}
};

template <>
struct TileScales<int8_t> {
  void take(const AttentionArgs& args, HeadRows<int8_t> keys, HeadRows<int8_t> values, TileRange seen) {
    for (int i = seen.begin; i < seen.end; ++i) {
      __builtin_memcpy(keys_ + i, keys.at(i) + args.key_scale_at, sizeof(float));
      __builtin_memcpy(values_ + i, values.at(i) + args.value_scale_at, sizeof(float));
    }
  }
  // [rows][kKeyTile], of the keys that any of the rows sees.
  void scale_scores(int rows, float* scores, TileRange any) const { scale(rows, scores, keys_, any); }
  void scale_weights(int rows, float* weights, TileRange any) const { scale(rows, weights, values_, any); }

 private:
  // What a row does not see in the registers of what it sees is scaled by whatever there is, and not looked at.
  static void scale(int rows, float* numbers, const float* scales, TileRange any) {
    for (int key = any.first_of_register(); key < any.end; key += kLanes) {
      const Vec scale = load(scales + key);
      for (int i = 0; i < rows; ++i)
        store(numbers + i * kKeyTile + key, mul(load(numbers + i * kKeyTile + key), scale));
    }
  }

  float keys_[kKeyTile] = {}, values_[kKeyTile] = {};
};

}  // namespace QUIRE_ISA
}  // namespace quire
