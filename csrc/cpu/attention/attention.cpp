// Attention over a paged cache, for any mix of chunks.
//
// The promise that a token's bits do not depend on its company is kept by construction: a row (one head of one token)
// walks its own keys, those that it sees, in tiles of kKeyTile and spans of kSpan, both anchored at position 0; each
// span starts an online softmax of its own, and spans are merged in order. Neither chunk, block size, block ids, row
// tiling nor threads come into it. What is done in a tile is in attention_vector.h and, of bf16 on AMX and AVX-512-BF16, attention_matrix.h and attention_pairs.h;
// decode and prefill do the same. An item of work is a few tokens of one sequence and one key/value head, or several
// of them where tokens are few: the rows of a head (tokens x query heads of its group) use a key tile while it is in
// the cache. What lies before the keys that an item's tokens see is not even looked up.
#include "cpu/attention/attention_item.h"
#include "cpu/attention/attention_matrix.h"
#include "cpu/attention/attention_pairs.h"
#include "cpu/attention/attention_vector.h"
#include "cpu/attention/attention_work.h"
#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"
#include "cpu/common/scratch.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

static_assert(kSpan % kKeyTile == 0, "a span is a number of whole tiles");

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
  if (!asks_by_turns()) return;
  for (int i = 0, to = 0; i < kLanes; ++i)
    for (int key = i; key < kKeyTile; key += kLanes, ++to) {
      tile.by_turns[0][to] = tile.keys[key];
      tile.by_turns[1][to] = tile.values[key];
    }
}

// Where a thread goes on when it has done an item, or a span of one.
struct Upcoming {
  const AttentionItem* item;  // null: nowhere
  int64_t span;               // counted from the item's first
};

int64_t first_tile(const AttentionItem& item, int64_t span) {
  const int64_t tile = item.keys.first / kKeyTile * kKeyTile, start = (item.first_span + span) * kSpan;
  return tile > start ? tile : start;
}

// What an item needs while it runs.
struct Workspace {
  RecordLayout layout;
  float* records;  // [heads][rows], of all spans so far
  float* later;    // [heads][rows], of the span at hand
  float* rest;     // for the tiles

  Workspace(const RecordLayout& layout, int64_t rows, int64_t tile_floats) : layout(layout) {
    const int64_t each = rows * layout.size();
    records = scratch<float, Workspace>(2 * each + tile_floats);  // every size is a multiple of a register's
    later = records + each;
    rest = later + each;
  }
};

// How a tile is worked on.
template <class T, class S>
struct TilesOf {
  using Type = VectorTiles<T, S>;
};
#if defined(__AMX_BF16__)
template <class S>
struct TilesOf<bf16, S> {
  using Type = MatrixTiles<S>;
};
#elif defined(__AVX512BF16__)
template <class S>
struct TilesOf<bf16, S> {
  using Type = PairTiles<bf16, S>;
};
template <class S>
struct TilesOf<SplitPairs, S> {
  using Type = PairTiles<SplitPairs, S>;
};
#endif

// T: of queries and of what comes out. S: of the cache's rows: T, or int8_t with a scale of each row.
template <class T, class S>
class Attention {
  using Tiles = typename TilesOf<T, S>::Type;

 public:
  static RecordLayout layout(const AttentionArgs& args) { return {args.value_dim, Tiles::Order::kStep}; }

  Attention(const AttentionArgs& args, const AttentionItem& item, Upcoming upcoming = {nullptr, 0})
      : args_(args), item_(item), upcoming_(upcoming), rows_(args, item),
        work_(layout(args), rows_.all(), Tiles::floats(args, layout(args), item.kv_heads, rows_.count)),
        tiles_(work_.rest, rows_, work_.layout) {}

  // All spans, into the output.
  void run() {
    take_queries();
    for (int64_t span = 0; span < item_.spans; ++span) {
      if (span == 0) {
        run_span(span, work_.records, item_.spans > 1);
        continue;
      }
      run_span(span, work_.later, span + 1 < item_.spans);
      merge_span(span, work_.records, work_.later);
    }
    put_out(work_.records);
  }

  // One span, counted from the item's first, into its place among the item's partial records.
  void run_partial(int64_t span) {
    take_queries();
    run_span(span, item_.partial + span * rows_.all() * work_.layout.size(), false);
  }

  // The spans' partial records, into the output.
  void run_merge() {
    for (int64_t span = 1; span < item_.spans; ++span)
      merge_span(span, item_.partial, item_.partial + span * rows_.all() * work_.layout.size());
    put_out(item_.partial);
  }

 private:
  int64_t start_of(int64_t span) const { return (item_.first_span + span) * kSpan; }

  void take_queries() {
    const T* query = static_cast<const T*>(args_.query);
    const int64_t head_rows = rows_.group * args_.head_dim;
    for (int64_t head = 0; head < item_.kv_heads; ++head)
      for (int64_t token = 0, i = 0; token < item_.tokens; ++token) {
        const T* row = query + (item_.token + token) * args_.query_stride + (item_.kv_head + head) * head_rows;
        for (int64_t own = 0; own < rows_.group; ++own, ++i, row += args_.head_dim) tiles_.take_query(head, i, row);
      }
  }

  void put_out(float* records) {
    for (int64_t head = 0; head < item_.kv_heads; ++head) {
      const int64_t first = (item_.kv_head + head) * rows_.group;
      for (int64_t token = 0; token < item_.tokens; ++token) {
        T* out = static_cast<T*>(args_.out) + ((item_.token + token) * args_.heads + first) * args_.value_dim;
        for (int64_t own = 0; own < rows_.group; ++own, records += work_.layout.size(), out += args_.value_dim) {
          if (args_.sinks) add_sink(work_.layout, records, args_.sinks[first + own]);
          finish<typename Tiles::Order>(work_.layout, records, args_.value_dim, out);
        }
      }
    }
  }

  // A row begins with the first span of which it sees a key, as if there were none before.
  void merge_span(int64_t span, float* records, float* later) {
    const int64_t start = start_of(span);
    for (int64_t i = 0; i < rows_.all(); ++i, records += work_.layout.size(), later += work_.layout.size()) {
      const KeyRange keys = rows_.seen(i % rows_.count);
      if (keys.first >= start)
        copy(work_.layout, records, later);
      else if (keys.end > start)
        merge(work_.layout, records, later);
    }
  }

  // goes_on: with the item's next span.
  void run_span(int64_t span, float* records, bool goes_on) {
    tiles_.begin();
    for (int64_t i = 0; i < rows_.all(); ++i) clear(work_.layout, records + i * work_.layout.size());
    const int64_t span_end = start_of(span) + kSpan, end = item_.keys.end < span_end ? item_.keys.end : span_end;
    int64_t key = first_tile(item_, span);
    TileRows<S> tiles[2];
    locate(args_, item_, key, tiles[0]);
    for (int t = 0; key < end; ++t, key += kKeyTile) {
      // The next tile travels while this one is worked on, over the end of the span and of the item too.
      const TileRows<S>&tile = tiles[t % 2], &next = tiles[1 - t % 2];
      if (key + kKeyTile < end || goes_on || !upcoming_.item)
        locate(args_, item_, key + kKeyTile, tiles[1 - t % 2]);
      else
        locate(args_, *upcoming_.item, first_tile(*upcoming_.item, upcoming_.span), tiles[1 - t % 2]);
      for (int64_t head = 0; head < item_.kv_heads; ++head)
        tiles_.run(head, key, tile, ahead(head, next), records + head * rows_.count * work_.layout.size());
      if (!goes_on && upcoming_.item) fetch_queries(*upcoming_.item, t, (end - key + kKeyTile - 1) / kKeyTile + t);
    }
    tiles_.end();
  }

  // Part number `part` of so many parts of an item's queries.
  void fetch_queries(const AttentionItem& item, int64_t part, int64_t parts) const {
    const int64_t head = rows_.group * args_.head_dim, bytes = item.kv_heads * head * static_cast<int64_t>(sizeof(T));
    const T* first = static_cast<const T*>(args_.query) + item.token * args_.query_stride + item.kv_head * head;
    for (int64_t i = item.tokens * part / parts; i < item.tokens * (part + 1) / parts; ++i) {
      const char* row = reinterpret_cast<const char*>(first + i * args_.query_stride);
      for (int64_t at = 0; at < bytes; at += 64) prefetch(row + at);
    }
  }

  // Of the next tile, a part for each head: a block's keys of all heads, its values, those of the block behind it, as
  // they lie. Or the head's own: where that is faster, or keys and values have not the same size.
  Ahead<S> ahead(int64_t head, const TileRows<S>& next) const {
    constexpr int kParts = Ahead<S>::kParts;
    const int64_t from_key = args_.block_size * args_.key_stride, from_value = args_.block_size * args_.value_stride;
    const bool by_turns = asks_by_turns(), own = by_turns || args_.head_dim != args_.value_dim;
    const S* const* keys = by_turns ? next.by_turns[0] : next.keys;
    const S* const* values = by_turns ? next.by_turns[1] : next.values;
    Ahead<S> parts;
    for (int i = 0; i < 2 * kParts; ++i) {
      HeadRows<S>& part = i < kParts ? parts.while_scored[i] : parts.while_weighed[i - kParts];
      const int64_t place = own ? 0 : head * 2 * kParts + i;
      const int64_t number = place / item_.kv_heads, of_head = place % item_.kv_heads;
      const int64_t first = number / 2 * kLanes;
      if (own)
        part = i < kParts ? HeadRows<S>{keys + i * kLanes, head * from_key}
                          : HeadRows<S>{values + (i - kParts) * kLanes, head * from_value};
      else
        part = number % 2 == 0 ? HeadRows<S>{keys + first, of_head * from_key}
                               : HeadRows<S>{values + first, of_head * from_value};
    }
    return parts;
  }

  const AttentionArgs& args_;
  const AttentionItem& item_;
  const Upcoming upcoming_;
  const ItemRows rows_;
  Workspace work_;
  Tiles tiles_;
};

template <class T, class S>
void attend(const AttentionArgs& args) {
  const AttentionPlan plan(args, Attention<T, S>::layout(args).size());
  if (!plan.split) {
    // after: the item that the thread has behind these, or -1.
    const auto run = [&](int64_t begin, int64_t end, int64_t after) {
      const FlushDenormals<T> flush;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t next = i + 1 < end ? i + 1 : after;
        Attention<T, S>(args, plan.items[i], {next < 0 ? nullptr : &plan.items[next], 0}).run();
      }
    };
    // The dearest items come first: a thread that took its next one early would keep it from the others.
    if (!plan.even) {
      parallel_for(plan.count, plan.grain, [&](int64_t begin, int64_t end) { run(begin, end, -1); });
      return;
    }
    const int64_t pieces = (plan.count + plan.grain - 1) / plan.grain;
    parallel_for_ahead(pieces, pieces, [&](int64_t piece, int64_t after) {
      const int64_t begin = piece * plan.grain, whole = begin + plan.grain;
      run(begin, whole < plan.count ? whole : plan.count, after < 0 ? -1 : after * plan.grain);
    });
    return;
  }
  const auto part = [&](int64_t i) -> Upcoming {
    if (i < 0 || i % plan.most_spans >= plan.items[i / plan.most_spans].spans) return {nullptr, 0};
    return {&plan.items[i / plan.most_spans], i % plan.most_spans};
  };
  parallel_for_ahead(plan.count * plan.most_spans, max_threads(), [&](int64_t i, int64_t next) {
    const FlushDenormals<T> flush;
    const Upcoming now = part(i);
    if (now.item) Attention<T, S>(args, *now.item, part(next)).run_partial(now.span);
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
