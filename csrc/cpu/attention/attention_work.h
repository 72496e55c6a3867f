// How a call's attention is cut into items of work, and the memory an item works in. Nothing here changes a bit of any
// result: an item's rows never meet another item's.
#pragma once

#include <stdlib.h>

#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

// Keys after which the online softmax starts anew, so that the spans of a long context may be worked on at once.
constexpr int64_t kSpan = 512;
// Rows of an item: enough for the packing of a key tile to be a small part of its work. Where a head has fewer, an
// item takes several: the heads of a block lie one after the other, and memory is read fastest in its order.
#if defined(__AVX512BF16__)
constexpr int64_t kItemRows = 192;  // whose products cost less
#else
constexpr int64_t kItemRows = 96;
#endif
// Split by spans only while the partial records stay small.
constexpr int64_t kMostPartialFloats = int64_t{1} << 22;
constexpr int64_t kPiecesEach = 4;  // items or spans that a thread should have, for the threads to end together
// Cost units (below) that take about ten microseconds.
constexpr int64_t kGrainCost = 200000;

// Positions first .. end of a sequence's keys.
struct KeyRange {
  int64_t first, end;
};

// What the query in row `token`, at `position` of its sequence, sees. Within a sequence, neither number descends.
inline KeyRange visible_keys(const AttentionArgs& args, int64_t token, int64_t position) {
  return {first_visible(args, position), args.visible_end ? args.visible_end[token] : position + 1};
}

struct AttentionItem {
  int64_t sequence;
  int64_t kv_head, kv_heads;  // the first, and how many
  int64_t token, tokens;      // the first, as a row of the query, and how many
  KeyRange keys;              // that any of its tokens sees
  int64_t first_span, spans;  // of these keys
  float* partial;             // [spans][kv_heads][rows] records, when split
};

struct AttentionPlan {
  AttentionItem* items = nullptr;
  int64_t count = 0, grain = 1, most_spans = 0;
  bool split = false;  // into spans: there are too few items for the threads, and contexts are long
  bool even = false;   // no item is so dear that threads would end apart if one thread took it beside another

  AttentionPlan(const AttentionArgs& args, int64_t record_size) {
    const int64_t group = args.heads / args.kv_heads;
    const int64_t tokens = group < kItemRows ? kItemRows / group : 1;
    int64_t* order = static_cast<int64_t*>(allocate(args.sequences * sizeof(int64_t)));
    sort_by_cost(args, tokens, order);
    const bool may_split = max_threads() > 1 && partial_floats(args, tokens, group, record_size) <= kMostPartialFloats;
    const int64_t head_parts = cut_heads(args, group, tokens, may_split);
    for (int64_t s = 0; s < args.sequences; ++s) count += head_parts * tiles_of(args, s, tokens);
    items = static_cast<AttentionItem*>(allocate(count * sizeof(AttentionItem)));
    int64_t next = 0, cost = 0, dearest = 0;
    for (int64_t i = 0; i < args.sequences; ++i) {
      const int64_t s = order[i], begin = args.query_start[s], total = own(args, s);
      const int64_t tiles = tiles_of(args, s, tokens);
      for (int64_t t = tiles - 1; t >= 0; --t) {  // the last tokens have the most keys
        const int64_t first = begin + total * t / tiles, last = begin + total * (t + 1) / tiles;
        const KeyRange keys = keys_of(args, s, first, last);
        const int64_t first_span = keys.first / kSpan, spans = (keys.end + kSpan - 1) / kSpan - first_span;
        most_spans = spans > most_spans ? spans : most_spans;
        for (int64_t part = 0; part < head_parts; ++part) {  // which lie beside each other in memory
          const int64_t head = args.kv_heads * part / head_parts,
                        heads = args.kv_heads * (part + 1) / head_parts - head;
          items[next++] = {s, head, heads, first, last - first, keys, first_span, spans, nullptr};
          const int64_t own_cost = heads * (4 + (last - first) * group) * (keys.end - keys.first) * args.head_dim;
          cost += own_cost, dearest = own_cost > dearest ? own_cost : dearest;
        }
      }
    }
    free(order);
    even = dearest * kPiecesEach * max_threads() <= cost;
    if (count > 0) grain = 1 + kGrainCost / (cost / count + 1);
    split = may_split && most_spans > 1 && count < kPiecesEach * max_threads();
    if (split) place_partials(partial_floats(args, tokens, group, record_size), group * record_size);
  }
  ~AttentionPlan() {
    free(partial_);
    free(items);
  }
  AttentionPlan(const AttentionPlan&) = delete;
  AttentionPlan& operator=(const AttentionPlan&) = delete;

 private:
  static void* allocate(size_t bytes) {
    void* p = aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (!p) abort();
    return p;
  }

  static int64_t own(const AttentionArgs& args, int64_t s) { return args.query_start[s + 1] - args.query_start[s]; }

  static int64_t tiles_of(const AttentionArgs& args, int64_t s, int64_t tokens) {
    return (own(args, s) + tokens - 1) / tokens;
  }

  // What tokens first .. last of a sequence see, which are rows of the query.
  static KeyRange keys_of(const AttentionArgs& args, int64_t s, int64_t first, int64_t last) {
    const int64_t before = args.context_len[s] - args.query_start[s + 1];  // a row's position, less the row
    return {visible_keys(args, first, before + first).first, visible_keys(args, last - 1, before + last - 1).end};
  }

  // Keys, and spans of them, that `tokens` neighbours of a sequence see at most.
  static int64_t most_keys(const AttentionArgs& args, int64_t s, int64_t tokens) {
    const int64_t length = args.context_len[s];
    const int64_t each = args.window > 0 && (args.chunk <= 0 || args.window < args.chunk) ? args.window : args.chunk;
    if (each <= 0 || args.visible_end || each >= length) return length;
    const int64_t keys = each - 1 + (own(args, s) < tokens ? own(args, s) : tokens);
    return keys < length ? keys : length;
  }
  static int64_t spans_of(const AttentionArgs& args, int64_t s, int64_t tokens) {
    const int64_t length = args.context_len[s], keys = most_keys(args, s, tokens);
    const int64_t whole = (length + kSpan - 1) / kSpan, touched = (keys + kSpan - 2) / kSpan + 1;
    return touched < whole ? touched : whole;
  }

  // What the partial records of all spans may take, however the call is cut into items of so many tokens.
  static int64_t partial_floats(const AttentionArgs& args, int64_t tokens, int64_t group, int64_t record_size) {
    int64_t floats = 0;
    for (int64_t s = 0; s < args.sequences; ++s)
      floats += spans_of(args, s, tokens) * own(args, s) * args.kv_heads * group * record_size;
    return floats;
  }

  // Into how many parts the heads are cut: so that an item has no more than its rows, and every thread a few items, or
  // spans of them where they may be split.
  static int64_t cut_heads(const AttentionArgs& args, int64_t group, int64_t tokens, bool may_split) {
    int64_t longest = 0, pieces = 0;
    for (int64_t s = 0; s < args.sequences; ++s) {
      longest = own(args, s) > longest ? own(args, s) : longest;
      pieces += tiles_of(args, s, tokens) * (may_split ? spans_of(args, s, tokens) : 1);
    }
    const int64_t rows = group * (longest < tokens ? longest : tokens), each = kPiecesEach * max_threads();
    int64_t heads = rows > 0 ? kItemRows / rows : 1;
    if (heads * each > args.kv_heads * pieces) heads = args.kv_heads * pieces / each;
    if (heads < 1) heads = 1;
    return heads < args.kv_heads ? (args.kv_heads + heads - 1) / heads : 1;
  }

  // Sequences with the dearest items first: a dear item taken last would keep all threads waiting. (Shell sort.)
  static void sort_by_cost(const AttentionArgs& args, int64_t tokens, int64_t* order) {
    const auto cost = [&](int64_t s) {
      const int64_t rows = own(args, s) < tokens ? own(args, s) : tokens;
      return (4 + rows) * most_keys(args, s, tokens);
    };
    for (int64_t i = 0; i < args.sequences; ++i) order[i] = i;
    for (int64_t gap = args.sequences / 2; gap > 0; gap /= 2) {
      for (int64_t i = gap; i < args.sequences; ++i) {
        const int64_t s = order[i], dear = cost(s);
        int64_t j = i;
        for (; j >= gap && cost(order[j - gap]) < dear; j -= gap) order[j] = order[j - gap];
        order[j] = s;
      }
    }
  }

  void place_partials(int64_t floats, int64_t token_size) {
    partial_ = static_cast<float*>(allocate(floats * sizeof(float)));
    float* place = partial_;
    for (int64_t i = 0; i < count; ++i) {
      items[i].partial = place;
      place += items[i].spans * items[i].kv_heads * items[i].tokens * token_size;
    }
  }

  float* partial_ = nullptr;
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire
