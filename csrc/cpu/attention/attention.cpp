// Attention over a paged cache, for any mix of chunks.
//
// The promise that a token's bits do not depend on its company is kept by construction: a row (one head of one token)
// walks its own keys, those that it sees, in tiles of kKeyTile and spans of kSpan, both anchored at position 0; each
// span starts an online softmax of its own, and spans are merged in order. Neither chunk, block size, block ids, row
// tiling nor threads come into it. An item of work is a few tokens of one sequence and one key/value head, or several
// of them where tokens are few: the rows of a head (tokens x query heads of its group) use a key tile while it is in
// the cache. What lies before the keys that an item's tokens see is not even looked up.
#include "cpu/attention/attention_rows.h"
#include "cpu/attention/attention_scales.h"
#include "cpu/attention/attention_scores.h"
#include "cpu/attention/attention_work.h"
#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"
#include "cpu/common/scratch.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

static_assert(kSpan % kKeyTile == 0, "a span is a number of whole tiles");

// The keys of a range that lie in the tile from position `first` on.
TileRange in_tile(KeyRange keys, int64_t first) {
  const auto place = [first](int64_t position) {
    const int64_t left = position - first;
    return static_cast<int>(left < 0 ? 0 : left < kKeyTile ? left : kKeyTile);
  };
  return {place(keys.first), place(keys.end)};
}

// Addresses of one tile's keys and values, found by way of the block table: those of the item's first head.
template <class S>
struct TileRows {
  const S* keys[kKeyTile];
  const S* values[kKeyTile];
  TileRange seen;  // by any of the item's tokens
};

template <class S>
void locate(const AttentionArgs& args, const AttentionItem& item, int64_t first, TileRows<S>& tile) {
  const S* keys = static_cast<const S*>(args.keys);
  const S* values = static_cast<const S*>(args.values);
  const TileRange seen = tile.seen = in_tile(item.keys, first);
  first += seen.begin;
  const int32_t* blocks = args.block_table + item.sequence * args.table_stride + first / args.block_size;
  int64_t offset = first % args.block_size;
  for (int i = seen.begin; i < seen.end; ++blocks, offset = 0) {
    const int64_t row = (*blocks * args.kv_heads + item.kv_head) * args.block_size + offset;
    const S *key = keys + row * args.key_stride, *value = values + row * args.value_stride;
    for (; offset < args.block_size && i < seen.end;
         ++offset, ++i, key += args.key_stride, value += args.value_stride) {
      tile.keys[i] = key;
      tile.values[i] = value;
    }
  }
  // Keys are packed sixteen at a time, and rows of the next tile prefetched without a look at their number. What fills
  // up the first and the last sixteen is masked: any key that may be read will do.
  const S* any_key = seen.empty() ? keys : tile.keys[seen.begin];
  const S* any_value = seen.empty() ? values : tile.values[seen.begin];
  for (int i = 0; i < seen.begin; ++i) tile.keys[i] = any_key, tile.values[i] = any_value;
  for (int i = seen.end; i < kKeyTile; ++i) tile.keys[i] = any_key, tile.values[i] = any_value;
}

// What an item needs beside its scores while it runs.
struct Workspace {
  RecordLayout layout;
  float* values;   // [kKeyTile][width]
  float* records;  // [heads][rows], of all spans so far
  float* later;    // [heads][rows], of the span at hand
  float* rest;     // for the scores

  Workspace(int64_t rows, int64_t value_dim, int64_t step, int64_t score_floats) : layout(value_dim, step) {
    const int64_t own = kKeyTile * layout.width, each = rows * layout.size();
    values = scratch<float, Workspace>(own + 2 * each + score_floats);  // every size is a multiple of a register's
    records = values + own;
    later = records + each;
    rest = later + each;
  }
};

// T: of queries and of what comes out. S: of the cache's rows: T, or int8_t with a scale of each row.
template <class T, class S>
class Attention {
  using Scores = typename ScoresOf<T>::Type;

 public:
  Attention(const AttentionArgs& args, const AttentionItem& item)
      : args_(args), item_(item), group_(args.heads / args.kv_heads), rows_(item.tokens * group_),
        all_rows_(item.kv_heads * rows_), changes_(args.head_scales || args.softcap > 0 || args.slopes),
        work_(all_rows_, args.value_dim, Units<S>::kStep, Scores::floats(item.kv_heads, rows_, args.head_dim)),
        scores_(work_.rest, item.kv_heads, rows_, args.head_dim, args.scale),
        first_position_(args.context_len[item.sequence] - args.query_start[item.sequence + 1] + item.token),
        shared_{seen(rows_ - 1).first, seen(0).end} {}

  // All spans, into the output.
  void run() {
    take_queries();
    for (int64_t span = 0; span < item_.spans; ++span) {
      if (span == 0) {
        run_span(span, work_.records);
        continue;
      }
      run_span(span, work_.later);
      merge_span(span, work_.records, work_.later);
    }
    put_out(work_.records);
  }

  // One span, counted from the item's first, into its place among the item's partial records.
  void run_partial(int64_t span) {
    take_queries();
    run_span(span, item_.partial + span * all_rows_ * work_.layout.size());
  }

  // The spans' partial records, into the output.
  void run_merge() {
    for (int64_t span = 1; span < item_.spans; ++span)
      merge_span(span, item_.partial, item_.partial + span * all_rows_ * work_.layout.size());
    put_out(item_.partial);
  }

 private:
  int64_t position(int64_t i) const { return first_position_ + i / group_; }  // of row i of a head
  KeyRange seen(int64_t i) const { return visible_keys(args_, item_.token + i / group_, position(i)); }
  int64_t query_head(int64_t head, int64_t i) const { return (item_.kv_head + head) * group_ + i % group_; }
  int64_t start_of(int64_t span) const { return (item_.first_span + span) * kSpan; }

  void take_queries() {
    const T* query = static_cast<const T*>(args_.query);
    for (int64_t head = 0; head < item_.kv_heads; ++head)
      for (int64_t i = 0; i < rows_; ++i)
        scores_.take_query(
            head, i, query + (item_.token + i / group_) * args_.query_stride + query_head(head, i) * args_.head_dim);
  }

  void put_out(float* records) {
    T* out = static_cast<T*>(args_.out);
    for (int64_t head = 0; head < item_.kv_heads; ++head)
      for (int64_t i = 0; i < rows_; ++i, records += work_.layout.size()) {
        const int64_t own = query_head(head, i);
        if (args_.sinks) add_sink(work_.layout, records, args_.sinks[own]);
        finish<S>(work_.layout, records, args_.value_dim,
                  out + ((item_.token + i / group_) * args_.heads + own) * args_.value_dim);
      }
  }

  // A row begins with the first span of which it sees a key, as if there were none before.
  void merge_span(int64_t span, float* records, float* later) {
    const int64_t start = start_of(span);
    for (int64_t i = 0; i < all_rows_; ++i, records += work_.layout.size(), later += work_.layout.size()) {
      const KeyRange keys = seen(i % rows_);
      if (keys.first >= start)
        copy(work_.layout, records, later);
      else if (keys.end > start)
        merge(work_.layout, records, later);
    }
  }

  void run_span(int64_t span, float* records) {
    scores_.begin();
    for (int64_t i = 0; i < all_rows_; ++i) clear(work_.layout, records + i * work_.layout.size());
    const int64_t start = start_of(span), tile_of_first = item_.keys.first / kKeyTile * kKeyTile;
    const int64_t end = item_.keys.end < start + kSpan ? item_.keys.end : start + kSpan;
    int64_t key = tile_of_first > start ? tile_of_first : start;
    TileRows<S> tiles[2];
    locate(args_, item_, key, tiles[0]);
    for (int t = 0; key < end; ++t, key += kKeyTile) {
      // What comes next travels while this is worked on: the next head's rows of these blocks, then the next tile's,
      // over the end of the span too.
      const TileRows<S>&tile = tiles[t % 2], &next = tiles[1 - t % 2];
      locate(args_, item_, key + kKeyTile, tiles[1 - t % 2]);
      for (int64_t head = 0; head < item_.kv_heads; ++head) {
        const bool is_last = head + 1 == item_.kv_heads;
        run_tile(head, key, tile, is_last ? next : tile, is_last ? 0 : head + 1,
                 records + head * rows_ * work_.layout.size());
      }
    }
    scores_.end();
  }

  void run_tile(int64_t head, int64_t first, const TileRows<S>& tile, const TileRows<S>& next, int64_t next_head,
                float* records) {
    const int64_t from_key = args_.block_size * args_.key_stride, from_value = args_.block_size * args_.value_stride;
    const HeadRows<S> keys{tile.keys, head * from_key}, ahead{next.keys, next_head * from_key};
    scores_.take_keys(head, keys, ahead, tile.seen);
    const HeadRows<S> values{tile.values, head * from_value};
    scales_.take(args_, keys, values, tile.seen);
    // Widening pays when several row tiles share its result.
    if (rows_ <= 2 * kRowTile && args_.value_dim % Units<S>::kStep == 0)
      return run_rows(head, first, CachedValues<S>{values, {next.values, next_head * from_value}}, records);
    for (int i = tile.seen.begin; i < tile.seen.end; ++i)
      widen_row(values.at(i), work_.values + i * work_.layout.width);
    run_rows(head, first, WideValues{work_.values, work_.layout.width}, records);
  }

  void widen_row(const S* row, float* wide) {
    using U = Units<S>;
    for (int64_t d = 0; d < args_.value_dim; d += U::kStep) {
      const int64_t left = args_.value_dim - d;
      const Vec units = left >= U::kStep ? U::load(row + d) : U::load(row + d, static_cast<int>(left));
      store(wide + d, U::template part<0>(units));
      if constexpr (U::kParts > 1) store(wide + d + kLanes, U::template part<1>(units));
    }
  }

  template <class Values>
  void run_rows(int64_t head, int64_t first, const Values& values, float* records) {
    const bool whole = shared_.first <= first && first + kKeyTile <= shared_.end;
    const int64_t tiles = (rows_ + kRowTile - 1) / kRowTile;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = rows_ * t / tiles;
      const int rows = static_cast<int>(rows_ * (t + 1) / tiles - row);
      TileRange ranges[kRowTile];
      for (int i = 0; i < rows; ++i) ranges[i] = whole ? TileRange{0, kKeyTile} : in_tile(seen(row + i), first);
      const TileRange any{ranges[0].begin, ranges[rows - 1].end};  // rows are in the order of their tokens
      if (any.begin >= any.end) continue;
      float factors[kLanes];
      float* record = records + row * work_.layout.size();
      float* scores = scores_.rows(head, row, rows, any);
      scales_.scale_scores(rows, scores, any);
      if (changes_)
        for (int i = 0; i < rows; ++i)
          change_scores(args_, query_head(head, row + i), first - position(row + i), ranges[i], scores + i * kKeyTile);
      soften(rows, scores, ranges, record, work_.layout, factors);
      scales_.scale_weights(rows, scores, any);
      gather(rows, scores, values, ranges, factors, record, work_.layout);
    }
  }

  const AttentionArgs& args_;
  const AttentionItem& item_;
  const int64_t group_, rows_, all_rows_;  // rows of a head, and of all
  const bool changes_;                     // scores are more than scaled products
  Workspace work_;
  Scores scores_;
  TileScales<S> scales_;
  const int64_t first_position_;  // of the item's tokens
  const KeyRange shared_;         // what all of them see
};

template <class T, class S>
void attend(const AttentionArgs& args) {
  const int64_t record = RecordLayout(args.value_dim, Units<S>::kStep).size();
  const AttentionPlan plan(args, record);
  if (!plan.split) {
    parallel_for(plan.count, plan.grain, [&](int64_t begin, int64_t end) {
      const FlushDenormals<T> flush;
      for (int64_t i = begin; i < end; ++i) Attention<T, S>(args, plan.items[i]).run();
    });
    return;
  }
  parallel_for(plan.count * plan.most_spans, [&](int64_t i) {
    const FlushDenormals<T> flush;
    const AttentionItem& item = plan.items[i / plan.most_spans];
    if (i % plan.most_spans < item.spans) Attention<T, S>(args, item).run_partial(i % plan.most_spans);
  });
  parallel_for(plan.count, [&](int64_t i) {
    const FlushDenormals<T> flush;
    Attention<T, S>(args, plan.items[i]).run_merge();
  });
}

template <class T>
void paged_attention_as(const AttentionArgs& args) {
  args.key_scale_at > 0 ? attend<T, int8_t>(args) : attend<T, T>(args);
}

void paged_attention_of_bf16(const AttentionArgs& args) {
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
  if (args.sequences > 0 && splits_pairs(args.query_start[args.sequences] / args.sequences))
    return paged_attention_as<SplitPairs>(args);
#endif
  paged_attention_as<bf16>(args);
}

}  // namespace

void paged_attention(const AttentionArgs& args) {
  switch (args.dtype) {
    case DType::float32: return paged_attention_as<float>(args);
    case DType::bfloat16: return paged_attention_of_bf16(args);
    case DType::float16: return paged_attention_as<fp16>(args);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
