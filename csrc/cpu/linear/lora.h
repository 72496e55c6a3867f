// What adapters add to a linear kernel's product: y = (y + scaling * (x A^T) B^T) * scale + shift, for segments of
// rows.
//
// Shrink makes h = x A^T in float32, one dot product along K an element as in linear_dot.h; expand adds h[r] * B[:, r]
// to a row of y for r = 0, 1, 2, ... So a row's result depends on its own adapter alone, not on the other segments,
// their ranks, or the number of threads. Threads shrink first; then each expands the columns of y that it has just
// multiplied, while they are in its cache.
#pragma once

#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"
#include "cpu/common/scratch.h"
#include "cpu/linear/linear_dot.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

// What one thread shrinks at a time: so many tokens with so many rows of A.
constexpr int64_t kShrinkTokens = 4 * kTileTokens, kShrinkRows = 16;

#if defined(__AVX512F__)
constexpr int kExpandTokens = 6;
#else
constexpr int kExpandTokens = 2;
#endif

// One adapter's share of one weight's product.
struct Job {
  const LoraEntry* entry;
  int64_t first, tokens;  // rows
  int64_t weight;         // its number among the weights
  int64_t shrink_end;     // number of the shrink items of this job and all before it
  float* h;               // [tokens, rank]
  float factor;
};

inline int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

template <class T>
void shrink(const LinearArgs& args, const Factors<T>& x, const Job& job, int64_t item) {
  const int64_t rank = job.entry->rank, tiles = pieces(job.tokens, kShrinkTokens);
  const int64_t begin = item % tiles * kShrinkTokens, row_begin = item / tiles * kShrinkRows;
  const int64_t end = begin + kShrinkTokens < job.tokens ? begin + kShrinkTokens : job.tokens;
  const int64_t row_end = row_begin + kShrinkRows < rank ? row_begin + kShrinkRows : rank;
  const T* a = static_cast<const T*>(job.entry->a);
  const int64_t parts = pieces(end - begin, kTileTokens);  // of even size
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t token = begin + (end - begin) * part / parts;
    const int64_t count = begin + (end - begin) * (part + 1) / parts - token;
    for (int64_t row = row_begin; row < row_end; row += kTileRows) {
      const int rows = static_cast<int>(row_end - row < kTileRows ? row_end - row : kTileRows);
      Tile<T> tile{x.row(job.first + token), x.stride(), {}, nullptr, args.features};
      for (int j = 0; j < kTileRows; ++j) tile.w[j] = a + (row + (j < rows ? j : rows - 1)) * args.features;
      tile.ahead = reinterpret_cast<const char*>(a + (row + kTileRows) * args.features);
      const Result<T, float> result{nullptr, job.h + token * rank + row, rank, rows};
      if (end - begin <= kTileTokens)
        multiply_some<T, float, kTileTokens, kTileRows>(count, tile, result);
      else
        multiply_some<T, float, kTileTokens, 0>(count, tile, result);
    }
  }
}

// kTokens rows of h with one block of B's columns, of which `width` exist.
template <class T, class Out, int kTokens>
inline __attribute__((always_inline)) void expand_tile(const Job& job, const float* h, const T* b, Out* y,
                                                       int64_t y_stride, int64_t column, int width) {
  constexpr int kVecs = kLoraColumns / kLanes;
  const int64_t rank = job.entry->rank;
  Vec sums[kTokens][kVecs];
#pragma GCC unroll 8
  for (int i = 0; i < kTokens; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) sums[i][v] = zero();
  for (int64_t r = 0; r < rank; ++r, b += kLoraColumns) {
    Vec w[kVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) w[v] = load(b + v * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kTokens; ++i) {
      const Vec factor = set1(h[i * rank + r]);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) sums[i][v] = fma(factor, w[v], sums[i][v]);
    }
  }
  const Vec factor = set1(job.factor);
#pragma GCC unroll 8
  for (int v = 0; v < kVecs; ++v) {
    const int left = width - v * kLanes, count = left < kLanes ? left : kLanes;
    if (count <= 0) break;
    const int64_t at = column + v * kLanes;
    const float *scale = job.entry->scale, *shift = job.entry->shift;
#pragma GCC unroll 8
    for (int i = 0; i < kTokens; ++i) {
      Out* out = y + i * y_stride + v * kLanes;
      Vec total = fma(sums[i][v], factor, load_first(out, count));
      if (scale) total = mul(total, load_first(scale + at, count));
      if (shift) total = add(total, load_first(shift + at, count));
      store_first(out, total, count);
    }
  }
}

template <class T, class Out, int kTokens>
inline void expand_some(int64_t tokens, const Job& job, const float* h, const T* b, Out* y, int64_t y_stride,
                        int64_t column, int width) {
  if (tokens == kTokens) return expand_tile<T, Out, kTokens>(job, h, b, y, y_stride, column, width);
  if constexpr (kTokens > 1) expand_some<T, Out, kTokens - 1>(tokens, job, h, b, y, y_stride, column, width);
}

template <class T, class Out, class Stored>
void expand(const Job& job, int64_t first, const LinearBlock<T, Out, Stored>& block) {
  const int64_t block_end = block.first + block.tokens, job_end = job.first + job.tokens;
  const int64_t begin = block.first > job.first ? block.first - job.first : 0;
  const int64_t tokens = (block_end < job_end ? block_end : job_end) - job.first - begin;
  if (tokens <= 0) return;
  const int64_t rank = job.entry->rank, parts = pieces(tokens, kExpandTokens);  // of even size
  const T* b = static_cast<const T*>(job.entry->b);
  for (int64_t row = 0; row < block.rows; row += kLoraColumns) {
    const int64_t column = first + row, left = block.rows - row;
    const int width = static_cast<int>(left < kLoraColumns ? left : kLoraColumns);
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t token = begin + tokens * part / parts, count = begin + tokens * (part + 1) / parts - token;
      Out* y = block.y + (job.first + token) * block.y_stride + row;
      expand_some<T, Out, kExpandTokens>(count, job, job.h + token * rank, b + column * rank, y, block.y_stride, column,
                                         width);
    }
  }
}

// The adapters of one call. `none` of them: nothing to do.
template <class T, class Out>
class Adapters {
 public:
  // jobs: memory for most_jobs(args); `place` has to follow.
  Adapters(const LinearArgs& args, const Factors<T>& x, Job* jobs) : args_(args), x_(x), jobs_(jobs) {
    for (int64_t s = 0; s < args.num_segments; ++s) {
      const LoraSegment& segment = args.segments[s];
      for (int64_t w = 0; w < args.count && segment.start < segment.end; ++w) {
        if (!args.tables[w].entries) continue;
        const LoraEntry& entry = args.tables[w].entries[segment.slot];
        if (entry.rank == 0 && !entry.scale && !entry.shift) continue;
        const int64_t tokens = segment.end - segment.start;
        shrink_items_ += pieces(tokens, kShrinkTokens) * pieces(entry.rank, kShrinkRows);
        jobs_[count_++] = {&entry,
                           segment.start,
                           tokens,
                           w,
                           shrink_items_,
                           nullptr,
                           static_cast<float>(entry.scaling * segment.weight)};
        hidden_ += tokens * entry.rank;
        work_ += (tokens + kFetchWork) * entry.rank * (args.features + args.weights[w].rows);
      }
    }
  }
  static int64_t most_jobs(const LinearArgs& args) { return args.num_segments * args.count; }

  // h: memory for hidden() elements.
  void place(float* h) {
    for (int64_t j = 0; j < count_; h += jobs_[j].tokens * jobs_[j].entry->rank, ++j) jobs_[j].h = h;
  }
  int64_t hidden() const { return hidden_; }

  bool none() const { return count_ == 0; }
  int64_t shrink_items() const { return shrink_items_; }
  int64_t work() const { return work_; }  // multiplications, fetching counted in

  void run_shrink(int64_t item) {
    const Job* job = jobs_;
    while (job->shrink_end <= item) ++job;
    shrink<T>(args_, x_, *job, item - (job == jobs_ ? 0 : job[-1].shrink_end));
    __atomic_fetch_add(&shrunk_, 1, __ATOMIC_RELEASE);
  }

  // Rows `first`.. of weight number `weight`, a multiple of kLoraColumns, whose product is in `block`.
  template <class Stored>
  void run_expand(int64_t weight, int64_t first, const LinearBlock<T, Out, Stored>& block) const {
    for (int spins = 0; __atomic_load_n(&shrunk_, __ATOMIC_ACQUIRE) < shrink_items_; ++spins)
      if (spins > kSpins) yield_thread();
    for (const Job* job = jobs_; job < jobs_ + count_; ++job)
      if (job->weight == weight) expand<T, Out>(*job, first, block);
  }

 private:
  static constexpr int kSpins = 1000;
  const LinearArgs& args_;
  const Factors<T> x_;
  Job* const jobs_;
  int64_t count_ = 0, hidden_ = 0, shrink_items_ = 0, work_ = 0, shrunk_ = 0;
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire
