// What adapters add to a linear kernel's product: y = (y + scaling * (x A^T) B^T) * scale + shift, for segments of
// rows.
//
// Shrink makes h = x A^T in float32, one dot product along K an element as in linear_dot.h; expand adds h[r] * B[:, r]
// to a row of y for r = 0, 1, 2, ... So a row's result depends on its own adapter alone, not on the other segments,
// their ranks, or the number of threads.
//
// Threads shrink first, then they multiply, and expand when both are done. Adapters come from memory, often for one
// token each: so an item of either kind reads its share of A or B from one end to the other, and what comes after it
// is fetched meanwhile.
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

// An item of expanding has so many columns of a weight at most; each thread has a few items, so that all end together.
constexpr int64_t kExpandColumns = 256, kExpandsEach = 4;
constexpr int64_t kCacheLine = 64;

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

// after: what the thread reads next, to be fetched meanwhile.
template <class T>
void shrink(const LinearArgs& args, const Factors<T>& x, const Job& job, int64_t item, const void* after) {
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
      tile.ahead = static_cast<const char*>(row + kTileRows < row_end ? a + (row + kTileRows) * args.features : after);
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

// Fetch a block of B's columns.
template <class T>
inline void prefetch_block(const Job& job, int64_t column) {
  const int64_t rank = job.entry->rank;
  const char* b = reinterpret_cast<const char*>(static_cast<const T*>(job.entry->b) + column * rank);
  for (int64_t at = 0; at < rank * kLoraColumns * static_cast<int64_t>(sizeof(T)); at += kCacheLine)
    __builtin_prefetch(b + at, 0, 2);
}

// `columns` columns of a weight from `column` on, a multiple of kLoraColumns; y: the call's first token, that column.
// after: the job that is next to read these columns of its B, or null.
template <class T, class Out>
void expand(const Job& job, const Job* after, int64_t column, int64_t columns, Out* y, int64_t y_stride) {
  const int64_t rank = job.entry->rank, parts = pieces(job.tokens, kExpandTokens);  // of even size
  const T* b = static_cast<const T*>(job.entry->b) + column * rank;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t token = job.tokens * part / parts, count = job.tokens * (part + 1) / parts - token;
    Out* own = y + (job.first + token) * y_stride;
    for (int64_t at = 0; at < columns; at += kLoraColumns) {
      const int width = static_cast<int>(columns - at < kLoraColumns ? columns - at : kLoraColumns);
      if (part == 0 && after) prefetch_block<T>(*after, column + at);
      if (part + 1 < parts)
        for (int i = 0; i < kExpandTokens; ++i) __builtin_prefetch(own + (count + i) * y_stride + at, 1, 3);
      expand_some<T, Out, kExpandTokens>(count, job, job.h + token * rank, b + at * rank, own + at, y_stride,
                                         column + at, width);
    }
  }
}

// What has been done of a call by all threads, for those who wait for it.
class Progress {
 public:
  void add() { __atomic_fetch_add(&done_, 1, __ATOMIC_RELEASE); }
  void wait_for(int64_t items) const {
    for (int spins = 0; __atomic_load_n(&done_, __ATOMIC_ACQUIRE) < items; ++spins)
      if (spins > kSpins) yield_thread();
  }

 private:
  static constexpr int kSpins = 1000;
  int64_t done_ = 0;
};

// The adapters of one call. `none` of them: nothing to do.
template <class T, class Out>
class Adapters {
 public:
  // jobs: memory for most_jobs(args); `place` has to follow.
  Adapters(const LinearArgs& args, const Factors<T>& x, Job* jobs) : args_(args), x_(x), jobs_(jobs) {
    if (args.num_segments == 0) return;
    for (int64_t w = 0; w < args.count; ++w) total_rows_ += args.weights[w].rows;
    const int64_t share = 1 + total_rows_ / (kExpandsEach * max_threads());
    expand_columns_ = share < kExpandColumns ? pieces(share, kLoraColumns) * kLoraColumns : kExpandColumns;
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

  // next: the item of shrinking that the thread does then, or -1.
  void run_shrink(int64_t item, int64_t next) const {
    const Job& job = job_of(item);
    shrink<T>(args_, x_, job, item - first_item(job), next < 0 ? job.entry->a : factors_of(next));
  }

  // Items of expanding, which are to follow when all shrinking and all products are done.
  int64_t expand_items() const {
    int64_t items = 0;
    for (int64_t w = 0; w < args_.count && count_ > 0; ++w) items += pieces(args_.weights[w].rows, expand_columns_);
    return items;
  }
  void run_expand(int64_t item) const {
    const int64_t most = expand_columns_;
    Out* y = static_cast<Out*>(args_.y);
    int64_t weight = 0;
    for (int64_t count; item >= (count = pieces(args_.weights[weight].rows, most)); item -= count)
      y += args_.weights[weight++].rows;
    const int64_t column = item * most, left = args_.weights[weight].rows - column;
    const int64_t y_stride = args_.y_stride > 0 ? args_.y_stride : total_rows_;
    for (const Job *job = next_of(weight, jobs_), *after; job; job = after) {
      after = next_of(weight, job + 1);
      expand<T, Out>(*job, after, column, left < most ? left : most, y + column, y_stride);
    }
  }

 private:
  // The job of an item of shrinking, the first item of a job, and the rows of A that an item reads.
  const Job& job_of(int64_t item) const {
    int64_t begin = 0, end = count_ - 1;
    while (begin < end) {
      const int64_t middle = (begin + end) / 2;
      if (jobs_[middle].shrink_end <= item)
        begin = middle + 1;
      else
        end = middle;
    }
    return jobs_[begin];
  }
  int64_t first_item(const Job& job) const { return &job == jobs_ ? 0 : (&job)[-1].shrink_end; }
  const void* factors_of(int64_t item) const {
    const Job& job = job_of(item);
    const int64_t row = (item - first_item(job)) / pieces(job.tokens, kShrinkTokens) * kShrinkRows;
    return static_cast<const T*>(job.entry->a) + row * args_.features;
  }

  const Job* next_of(int64_t weight, const Job* job) const {
    while (job < jobs_ + count_ && job->weight != weight) ++job;
    return job < jobs_ + count_ ? job : nullptr;
  }

  const LinearArgs& args_;
  const Factors<T> x_;
  Job* const jobs_;
  int64_t count_ = 0, hidden_ = 0, shrink_items_ = 0, work_ = 0;
  int64_t total_rows_ = 0, expand_columns_ = 0;  // of all weights; of an item of expanding at most
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire
