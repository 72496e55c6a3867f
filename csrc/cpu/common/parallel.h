// Work shared among threads: torch's own OpenMP team where there is one (see parallel.cpp), so that its threads and
// ours never fight over the cores.
//
//   parallel_for(n, grain, body)   body(begin, end) for pieces of [0, n) of at most `grain` items, in any order
//   parallel_for(n, body)          body(i) for each i in [0, n)
//   parallel_for_ahead(n, max_team, body)
//                                  body(i, next) for each i; next is what the same thread does afterwards (to prefetch
//                                  it), or -1. On max_team threads at most. Begun in rising order: a thread that is
//                                  at i may wait for what others do for lower numbers.
//
// Threads claim pieces from a counter, so a slow core takes fewer. What body writes must not depend on the split.
// Up to one grain runs inline: choose it worth 5 microseconds or more, about what it costs to wake a team.
// It may be nested and called from several threads at once; body must not throw.
#pragma once

#include <stdint.h>

namespace quire {

// Run task(data) once on each of `threads` threads, the caller's among them, and return when all are done.
void run_team(int threads, void (*task)(void*), void* data);
// Let others run: what a thread waits for may need its core.
void yield_thread();
// How many threads a team of the calling thread may have: torch.get_num_threads().
int max_threads();
// Called by a thread that is about to claim a piece, where a team is simulated (simulated_team.h); else null.
extern void (*between_pieces)();

namespace QUIRE_ISA {

inline int64_t claim(int64_t* next, int64_t count) {
  if (__builtin_expect(between_pieces != nullptr, 0)) between_pieces();
  return __atomic_fetch_add(next, count, __ATOMIC_RELAXED);
}

template <class Body>
inline void parallel_for(int64_t n, int64_t grain, const Body& body) {
  if (grain < 1) grain = 1;
  if (n <= 0) return;
  const int64_t pieces = (n + grain - 1) / grain;
  int64_t threads = pieces == 1 ? 1 : max_threads();
  if (threads > pieces) threads = pieces;
  if (threads <= 1) return body(int64_t{0}, n);
  struct Shared {
    const Body& body;
    const int64_t n, grain;
    int64_t next;
  } shared{body, n, grain, 0};
  run_team(
      static_cast<int>(threads),
      [](void* data) {
        Shared& shared = *static_cast<Shared*>(data);
        for (;;) {
          const int64_t begin = claim(&shared.next, shared.grain);
          if (begin >= shared.n) return;
          const int64_t end = begin + shared.grain;
          shared.body(begin, end < shared.n ? end : shared.n);
        }
      },
      &shared);
}

template <class Body>
inline void parallel_for(int64_t n, const Body& body) {
  parallel_for(n, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i);
  });
}

template <class Body>
inline void parallel_for_ahead(int64_t n, int64_t max_team, const Body& body) {
  struct Shared {
    const Body& body;
    const int64_t n;
    int64_t next;
  } shared{body, n, 0};
  const auto task = [](void* data) {
    Shared& shared = *static_cast<Shared*>(data);
    int64_t piece = claim(&shared.next, 1);
    while (piece < shared.n) {
      const int64_t next = claim(&shared.next, 1);
      shared.body(piece, next < shared.n ? next : -1);
      piece = next;
    }
  };
  int64_t threads = max_team > 1 && n > 1 ? max_threads() : 1;
  if (threads > max_team) threads = max_team;
  if (threads > n) threads = n;
  if (threads > 1)
    run_team(static_cast<int>(threads), task, &shared);
  else
    task(&shared);
}

}  // namespace QUIRE_ISA
}  // namespace quire
