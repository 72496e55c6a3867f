// Which of a layer's states a sequence's tokens read and write: see PastArgs. A state is named by its place in [N, 2].
#pragma once

#include "arguments.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

// The tokens of sequence s in the step: rows `first` .. `end`, and the position of the first.
struct Rows {
  int64_t first, end, position;
};

inline Rows rows_of(const PastArgs& past, int64_t s) {
  const int64_t first = past.query_start[s], end = past.query_start[s + 1];
  return {first, end, past.context_len[s] - (end - first)};
}

// The state in front of a position; -1: there is none, as it is the first.
inline int64_t state_before(const PastArgs& past, int64_t s, int64_t position) {
  if (position == 0) return -1;
  const int64_t block = past.block_table[s * past.table_stride + (position - 1) / past.block_size];
  return 2 * block + (past.ends[2 * block + 1] == position);
}

// step(first, end, from, to) for each run of a sequence's rows behind which a state is left, in order: it reads state
// `from` (or -1) and writes `to`.
template <class Step>
inline void each_run(const PastArgs& past, int64_t s, const Step& step) {
  const Rows rows = rows_of(past, s);
  if (rows.first == rows.end) return;
  const int32_t* table = past.block_table + s * past.table_stride;
  const int64_t last = rows.position + rows.end - rows.first, read = state_before(past, s, rows.position);
  int64_t from = read;
  for (int64_t position = rows.position; position < last;) {
    int64_t place = position / past.block_size;
    while (table[place] < 0) ++place;
    int64_t end = (place + 1) * past.block_size;
    if (end > last) end = last;
    const int64_t to = 2 * static_cast<int64_t>(table[place]) + (read >= 0 && read == 2 * table[place]);
    step(rows.first + position - rows.position, rows.first + end - rows.position, from, to);
    from = to, position = end;
  }
}

// Say what was written, once all of it is.
inline void mark(const PastArgs& past) {
  for (int64_t s = 0; s < past.sequences; ++s) {
    const Rows rows = rows_of(past, s);
    if (rows.first == rows.end) continue;
    const int64_t read = state_before(past, s, rows.position);
    each_run(past, s, [&](int64_t, int64_t end, int64_t, int64_t to) {
      past.ends[to] = rows.position + end - rows.first;
      if ((to ^ 1) != read) past.ends[to ^ 1] = -1;
    });
  }
}

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire
