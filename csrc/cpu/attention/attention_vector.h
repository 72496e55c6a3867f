// A key tile's work in vectors (simd.h): what all instruction sets have, for all types of rows.
#pragma once

#include "cpu/attention/attention_item.h"
#include "cpu/attention/attention_scales.h"
#include "cpu/attention/attention_scores.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

// T: of queries. S: of the cache's rows.
template <class T, class S>
class VectorTiles {
 public:
  using Order = Units<S>;  // in which a record has its values

  static int64_t floats(const AttentionArgs& args, const RecordLayout& layout, int64_t heads, int64_t rows) {
    return kKeyTile * layout.width + VectorScores<T>::floats(heads, rows, args.head_dim);
  }
  VectorTiles(float* memory, const ItemRows& rows, const RecordLayout& layout)
      : args_(rows.args), rows_(rows), layout_(layout), values_(memory),
        scores_(memory + kKeyTile * layout.width, rows.item.kv_heads, rows.count, args_.head_dim, args_.scale) {}

  void begin() {}
  void end() {}
  void take_query(int64_t head, int64_t i, const T* row) { scores_.take_query(head, i, row); }

  // The tile's keys from position `first` on, for all rows of a head; then: what is asked for meanwhile.
  void run(int64_t head, int64_t first, const TileRows<S>& tile, const Ahead<S>& then, float* records) {
    const HeadRows<S> keys{tile.keys, rows_.key_offset(head)}, values{tile.values, rows_.value_offset(head)};
    scores_.take_keys(head, keys, then, tile.seen);
    scales_.take(args_, keys, values, tile.seen);
    // Widening pays when several row tiles share its result.
    if (rows_.count <= 2 * kRowTile && args_.value_dim % Units<S>::kStep == 0)
      return run_rows(head, first, CachedValues<S>{values, then.while_weighed}, records);
    for (int i = tile.seen.begin; i < tile.seen.end; ++i)
      widen_row(values.at(i), then.while_weighed[i / kLanes].at(i % kLanes), values_ + i * layout_.width);
    run_rows(head, first, WideValues{values_, layout_.width}, records);
  }

 private:
  void widen_row(const S* row, const S* next, float* wide) {
    using U = Units<S>;
    for (int64_t d = 0; d < args_.value_dim; d += U::kStep) {
      const int64_t left = args_.value_dim - d;
      prefetch(next + d);
      const Vec units = left >= U::kStep ? U::load(row + d) : U::load(row + d, static_cast<int>(left));
      store(wide + d, U::template part<0>(units));
      if constexpr (U::kParts > 1) store(wide + d + kLanes, U::template part<1>(units));
    }
  }

  template <class Values>
  void run_rows(int64_t head, int64_t first, const Values& values, float* records) {
    const bool whole = rows_.shared.first <= first && first + kKeyTile <= rows_.shared.end;
    const int64_t tiles = (rows_.count + kRowTile - 1) / kRowTile;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = rows_.count * t / tiles;
      const int rows = static_cast<int>(rows_.count * (t + 1) / tiles - row);
      TileRange ranges[kRowTile];
      for (int i = 0; i < rows; ++i) ranges[i] = whole ? TileRange{0, kKeyTile} : in_tile(rows_.seen(row + i), first);
      const TileRange any{ranges[0].begin, ranges[rows - 1].end};  // rows are in the order of their tokens
      if (any.begin >= any.end) continue;
      float factors[kLanes];
      float* record = records + row * layout_.size();
      float* scores = scores_.rows(head, row, rows, any);
      scales_.scale_scores(rows, scores, any);
      if (rows_.changes)
        for (int i = 0; i < rows; ++i)
          change_scores(args_, rows_.query_head(head, row + i), first - rows_.position(row + i), ranges[i],
                        scores + i * kKeyTile);
      soften(rows, scores, ranges, record, layout_, factors);
      scales_.scale_weights(rows, scores, any);
      gather(rows, scores, values, ranges, factors, record, layout_);
    }
  }

  const AttentionArgs& args_;
  const ItemRows& rows_;
  const RecordLayout& layout_;
  float* const values_;  // [kKeyTile][width]
  VectorScores<T> scores_;
  TileScales<S> scales_;
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire
