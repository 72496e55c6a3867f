// y = (y + scaling * (x A^T) B^T) * scale + shift, for segments of rows, each with an adapter of its own rank.
//
// Shrink makes h = x A^T in float32, one dot product along K an element as in linear.cpp; expand adds h[r] * B[:, r] to a
// row of y for r = 0, 1, 2, ... So a row's result depends on its own adapter alone, not on the other segments, their
// ranks, or the number of threads.
#include "kernels.h"
#include "linear_dot.h"
#include "parallel.h"
#include "scratch.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

// What one thread takes at a time: so many tokens and rows of A, or blocks of columns of B.
constexpr int64_t kItemTokens = 4 * kTileTokens, kShrinkRows = 16, kExpandBlocks = 16;
// As in linear.cpp: what is worth waking another thread for, where fetching a weight from memory counts as eight
// multiplications.
constexpr int64_t kThreadWork = 1 << 20, kFetchWork = 8;

#if defined(__AVX512F__)
constexpr int kExpandTokens = 6;
#else
constexpr int kExpandTokens = 2;
#endif

// One adapter's share of one layer in this call.
struct Job {
  const LoraEntry* entry;
  int64_t first, tokens;  // rows
  int64_t column, columns;
  float factor;
  float* h;  // [tokens, rank]
  int64_t shrink_end, expand_end;  // numbers of the items of this job and all before it
};

int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

int64_t token_tiles(const Job& job) { return pieces(job.tokens, kItemTokens); }

int64_t shrink_items(const Job& job) { return token_tiles(job) * pieces(job.entry->rank, kShrinkRows); }

int64_t expand_items(const Job& job) { return token_tiles(job) * pieces(job.columns, kLoraColumns * kExpandBlocks); }

template <class T>
void shrink(const LoraArgs& args, const Job& job, int64_t item) {
  const int64_t rank = job.entry->rank, tiles = token_tiles(job);
  const int64_t begin = item % tiles * kItemTokens, row_begin = item / tiles * kShrinkRows;
  const int64_t end = begin + kItemTokens < job.tokens ? begin + kItemTokens : job.tokens;
  const int64_t row_end = row_begin + kShrinkRows < rank ? row_begin + kShrinkRows : rank;
  const T* x = static_cast<const T*>(args.x) + job.first * args.x_stride;
  const T* a = static_cast<const T*>(job.entry->a);
  const int64_t parts = pieces(end - begin, kTileTokens);  // of even size
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t token = begin + (end - begin) * part / parts;
    const int64_t count = begin + (end - begin) * (part + 1) / parts - token;
    for (int64_t row = row_begin; row < row_end; row += kTileRows) {
      const int rows = static_cast<int>(row_end - row < kTileRows ? row_end - row : kTileRows);
      Tile<T> tile{x + token * args.x_stride, args.x_stride, {}, nullptr, args.features};
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

template <class T, class Out>
void expand(const LoraArgs& args, const Job& job, int64_t item, int64_t y_stride) {
  const int64_t rank = job.entry->rank, tiles = token_tiles(job);
  const int64_t begin = item % tiles * kItemTokens;
  const int64_t end = begin + kItemTokens < job.tokens ? begin + kItemTokens : job.tokens;
  const int64_t first = item / tiles * kExpandBlocks * kLoraColumns;
  const T* b = static_cast<const T*>(job.entry->b);
  const int64_t parts = pieces(end - begin, kExpandTokens);
  for (int64_t block = 0; block < kExpandBlocks; ++block) {
    const int64_t column = first + block * kLoraColumns, left = job.columns - column;
    if (left <= 0) return;
    const int width = static_cast<int>(left < kLoraColumns ? left : kLoraColumns);
    Out* y = static_cast<Out*>(args.y) + job.first * y_stride + job.column + column;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t token = begin + (end - begin) * part / parts;
      const int64_t count = begin + (end - begin) * (part + 1) / parts - token;
      expand_some<T, Out, kExpandTokens>(count, job, job.h + token * rank, b + column * rank, y + token * y_stride,
                                         y_stride, column, width);
    }
  }
}

// body(job, item of that job) for all items, by several threads where `work` is worth it.
template <class Body>
void for_items(const Job* jobs, int64_t Job::*ends, int64_t items, int64_t work, const Body& body) {
  const int64_t grain = work < 2 * kThreadWork ? items : items * (kThreadWork / 2) / work;
  parallel_for(items, grain, [&](int64_t begin, int64_t end) {
    int64_t job = 0;
    for (int64_t item = begin; item < end; ++item) {
      while (jobs[job].*ends <= item) ++job;
      body(jobs[job], item - (job ? jobs[job - 1].*ends : 0));
    }
  });
}

struct JobScratch {};
struct HiddenScratch {};

// The segments of one round name no row twice, so that their items may be done in any order.
template <class T, class Out>
void lora_round(const LoraArgs& args, const LoraSegment* segments, int64_t num_segments, int64_t y_stride) {
  Job* jobs = reinterpret_cast<Job*>(scratch<int64_t, JobScratch>(
      num_segments * args.count * static_cast<int64_t>(sizeof(Job) / sizeof(int64_t))));
  int64_t count = 0, hidden = 0, shrink_count = 0, expand_count = 0, shrink_work = 0, expand_work = 0;
  for (int64_t s = 0; s < num_segments; ++s) {
    const LoraSegment& segment = segments[s];
    int64_t column = 0;
    for (int64_t p = 0; p < args.count; column += args.parts[p++].columns) {
      const LoraPart& part = args.parts[p];
      if (!part.table || segment.end <= segment.start) continue;
      const LoraEntry& entry = part.table[segment.slot];
      if (entry.rank == 0 && !entry.scale && !entry.shift) continue;
      const float factor = static_cast<float>(entry.scaling * segment.weight);
      Job job{&entry, segment.start, segment.end - segment.start, column, part.columns, factor, nullptr, 0, 0};
      job.shrink_end = shrink_count += shrink_items(job);
      job.expand_end = expand_count += expand_items(job);
      hidden += job.tokens * entry.rank;
      shrink_work += (job.tokens + kFetchWork) * entry.rank * args.features;
      expand_work += (job.tokens + kFetchWork) * (entry.rank + 1) * part.columns;
      jobs[count++] = job;
    }
  }
  if (count == 0) return;
  float* h = scratch<float, HiddenScratch>(hidden);
  for (int64_t j = 0; j < count; h += jobs[j].tokens * jobs[j].entry->rank, ++j) jobs[j].h = h;
  for_items(jobs, &Job::shrink_end, shrink_count, shrink_work,
            [&](const Job& job, int64_t item) { shrink<T>(args, job, item); });
  for_items(jobs, &Job::expand_end, expand_count, expand_work,
            [&](const Job& job, int64_t item) { expand<T, Out>(args, job, item, y_stride); });
}

// A mixture names its rows once for each of its adapters, one after the other: these are added in that order.
template <class T, class Out>
void lora_as(const LoraArgs& args) {
  int64_t y_stride = 0, first = 0;
  for (int64_t p = 0; p < args.count; ++p) y_stride += args.parts[p].columns;
  while (first < args.num_segments) {
    int64_t last = first + 1, covered = args.segments[first].end;
    while (last < args.num_segments && args.segments[last].start >= covered) covered = args.segments[last++].end;
    lora_round<T, Out>(args, args.segments + first, last - first, y_stride);
    first = last;
  }
}

template <class T>
void lora_of(const LoraArgs& args) {
  if (args.out_dtype == DType::float32) return lora_as<T, float>(args);
  lora_as<T, T>(args);
}

}  // namespace

void lora(const LoraArgs& args) {
  switch (args.dtype) {
    case DType::float32: return lora_of<float>(args);
    case DType::bfloat16: return lora_of<bf16>(args);
    case DType::float16: return lora_of<fp16>(args);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
