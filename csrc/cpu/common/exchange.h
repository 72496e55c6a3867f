// Columns that several processes have computed of one matrix, put together in each of them, by way of memory that all
// of them map.
//
// The memory begins with a counter for each process, and then has two places. In its turn number n a process writes its
// own columns into place n % 2, counts itself to n, waits until every other one has, and copies their columns. It writes
// a place again in turn n + 2, when all have counted to n + 1: they have done with turn n by then.
#pragma once

#include <stdint.h>

namespace quire {

constexpr int64_t kCounterBytes = 64;  // a cache line each, with what is done in the last two turns

struct ExchangeArgs {
  char* memory;                    // size counters, then two places of place_bytes each
  int64_t place_bytes;             // what one row of all columns takes, at least
  int64_t rank, size;              // this process, and how many there are
  const void* own;                 // [rows, own columns], contiguous
  void* all;                       // [rows, columns], contiguous
  int64_t rows, columns, element;  // element: bytes
  // [parts, size + 1]: process r has the columns bounds[p][r] .. bounds[p][r + 1] of part p; its columns lie side by
  // side in the order of the parts.
  const int64_t* bounds;
  int64_t parts;
};

// Throws runtime_error where another process has other rows or columns in its turn of this number.
void gather_columns(const ExchangeArgs& args);

}  // namespace quire
