// The rows of an item of work: one query head of one token each, the heads of a group one after the other, then those of
// the next token.
#pragma once

#include "cpu/attention/attention_rows.h"
#include "cpu/attention/attention_work.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

// The keys of a range that lie in the tile from position `first` on.
inline TileRange in_tile(KeyRange keys, int64_t first) {
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
  const S* by_turns[2][kKeyTile];  // keys, values: the first of each sixteen, the second ..; where `asks_by_turns`
  TileRange seen;                  // by any of the item's tokens
};

struct ItemRows {
  const AttentionArgs& args;
  const AttentionItem& item;
  const int64_t group, count;    // heads of a key/value head; rows of each of these
  const int64_t first_position;  // of the item's tokens
  const bool changes;            // scores are more than scaled products
  const KeyRange shared;         // what all rows see

  ItemRows(const AttentionArgs& args, const AttentionItem& item)
      : args(args), item(item), group(args.heads / args.kv_heads), count(item.tokens * group),
        first_position(args.context_len[item.sequence] - args.query_start[item.sequence + 1] + item.token),
        changes(args.head_scales || args.softcap > 0 || args.slopes || args.biases),
        shared{seen(count - 1).first, seen(0).end} {}

  int64_t all() const { return item.kv_heads * count; }
  int64_t position(int64_t i) const { return first_position + i / group; }  // of row i of a head
  KeyRange seen(int64_t i) const { return visible_keys(args, item.token + i / group, position(i)); }
  int64_t query_head(int64_t head, int64_t i) const { return (item.kv_head + head) * group + i % group; }
  int64_t key_offset(int64_t head) const { return head * args.block_size * args.key_stride; }
  int64_t value_offset(int64_t head) const { return head * args.block_size * args.value_stride; }
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire
