#define QUIRE_ISA portable
#include "cpu/common/exchange.h"

#include <string.h>
#include <time.h>

#include <stdexcept>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu/common/parallel.h"

namespace quire {
namespace {

constexpr int kSpins = 4096, kYields = 64;     // some tens of microseconds each
constexpr long kSleepNanoseconds = 50 * 1000;  // from then on
constexpr int64_t kThreadBytes = 128 << 10;    // worth another thread

uint64_t* counter(const ExchangeArgs& args, int64_t rank) {
  return reinterpret_cast<uint64_t*>(args.memory + rank * kCounterBytes);
}
// What a process does in a turn, beside its counter: it is told from the turn before and the turn behind.
uint64_t* shape(const ExchangeArgs& args, int64_t rank, uint64_t turn) { return counter(args, rank) + 1 + turn % 2; }

void wait_for(const uint64_t* counter, uint64_t turn) {
  for (int64_t i = 0;; ++i) {
    if (__atomic_load_n(counter, __ATOMIC_ACQUIRE) >= turn) return;
    if (i < kSpins) {
#if defined(__x86_64__)
      _mm_pause();
#endif
    } else if (i < kSpins + kYields) {
      yield_thread();
    } else {
      const timespec pause{0, kSleepNanoseconds};
      nanosleep(&pause, nullptr);
    }
  }
}

int64_t columns_of(const ExchangeArgs& args, int64_t rank) {
  int64_t count = 0;
  for (int64_t p = 0; p < args.parts; ++p) {
    const int64_t* bounds = args.bounds + p * (args.size + 1);
    count += bounds[rank + 1] - bounds[rank];
  }
  return count;
}

// Rows [begin, end) of one process's columns, from where they lie side by side to their places.
void put(const ExchangeArgs& args, int64_t rank, const char* from, char* all, int64_t begin, int64_t end) {
  const int64_t width = columns_of(args, rank) * args.element, stride = args.columns * args.element;
  for (int64_t row = begin; row < end; ++row) {
    const char* source = from + row * width;
    for (int64_t p = 0; p < args.parts; ++p) {
      const int64_t* bounds = args.bounds + p * (args.size + 1);
      const int64_t bytes = (bounds[rank + 1] - bounds[rank]) * args.element;
      memcpy(all + row * stride + bounds[rank] * args.element, source, bytes);
      source += bytes;
    }
  }
}

// body(begin, end) for pieces of [0, rows), on several threads where it is worth them.
template <class Body>
void in_pieces(int64_t rows, int64_t row_bytes, const Body& body) {
  portable::parallel_for(rows, kThreadBytes / (row_bytes + 1) + 1, body);
}

// So many rows that fit a place.
void gather_some(const ExchangeArgs& args, const char* own, char* all, int64_t rows) {
  uint64_t* mine = counter(args, args.rank);
  const uint64_t turn = *mine + 1;
  char* place = args.memory + args.size * kCounterBytes + (turn % 2) * args.place_bytes;
  int64_t before = 0;
  for (int64_t r = 0; r < args.rank; ++r) before += columns_of(args, r);
  const int64_t width = columns_of(args, args.rank) * args.element;
  char* shared = place + before * rows * args.element;
  in_pieces(rows, width, [&](int64_t begin, int64_t end) {
    memcpy(shared + begin * width, own + begin * width, (end - begin) * width);
  });
  const uint64_t own_shape = static_cast<uint64_t>((args.rows << 40) ^ (args.columns << 8) ^ args.element);
  *shape(args, args.rank, turn) = own_shape;
  __atomic_store_n(mine, turn, __ATOMIC_RELEASE);
  in_pieces(rows, width, [&](int64_t begin, int64_t end) { put(args, args.rank, own, all, begin, end); });
  const char* from = place;
  for (int64_t r = 0; r < args.size; ++r) {
    const int64_t theirs = columns_of(args, r) * args.element;
    if (r != args.rank) {
      wait_for(counter(args, r), turn);
      if (*shape(args, r, turn) != own_shape)
        throw std::runtime_error("processes that compute one model are not at the same place of it");
      in_pieces(rows, theirs, [&](int64_t begin, int64_t end) { put(args, r, from, all, begin, end); });
    }
    from += theirs * rows;
  }
}

}  // namespace

void gather_columns(const ExchangeArgs& args) {
  const int64_t row_bytes = args.columns * args.element;
  const int64_t most = row_bytes > 0 ? args.place_bytes / row_bytes : args.rows;
  const int64_t width = columns_of(args, args.rank) * args.element;
  const char* own = static_cast<const char*>(args.own);
  char* all = static_cast<char*>(args.all);
  for (int64_t row = 0; row < args.rows; row += most)
    gather_some(args, own + row * width, all + row * row_bytes, args.rows - row < most ? args.rows - row : most);
}

}  // namespace quire
