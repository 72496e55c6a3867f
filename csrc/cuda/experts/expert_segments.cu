// Whose rows sorted by expert are, for `lora`: the step's segments name tokens; here they become segments of rows, one
// for each expert that a segment's tokens go to, and each gets the entries of its expert's tables for its own.
//
// One block of threads does all of it, in the order of the rows: what it makes is compact, so that the blocks of `lora`
// find their tiles quickly, and segments that name the same rows follow each other as they do in the step.
#include "cuda/common/kernels.h"

namespace quire::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;

__device__ __forceinline__ bool same_tokens(const LoraSegment& a, const LoraSegment& b) {
  return a.start == b.start && a.end == b.end;
}

// owners[t]: the first of the segments that token t is of, or -1.
__device__ __forceinline__ void find_owners(const ExpertSegmentsArgs& args) {
  const int tokens = static_cast<int>(args.num_tokens), lane = threadIdx.x % kWarp;
  for (int t = threadIdx.x; t < tokens; t += kThreads) args.owners[t] = -1;
  __syncthreads();
  // A lane looks at a segment, and the warp fills in those of all lanes, one after the other.
  for (int64_t base = threadIdx.x / kWarp * kWarp; base < args.num_segments; base += kThreads) {
    const int64_t s = base + lane;
    int start = 0, end = 0;
    if (s < args.num_segments && !(s > 0 && same_tokens(args.segments[s], args.segments[s - 1]))) {
      start = static_cast<int>(max(args.segments[s].start, int64_t{0}));
      end = static_cast<int>(min(args.segments[s].end, args.num_tokens));
    }
    for (int i = 0; i < kWarp; ++i) {
      const int first = __shfl_sync(kAllLanes, start, i), last = __shfl_sync(kAllLanes, end, i);
      for (int t = first + lane; t < last; t += kWarp) args.owners[t] = static_cast<int>(base) + i;
    }
  }
  __syncthreads();
}

// The first of the numbers from `begin` on for which `is_beyond` holds, or `end`.
template <class IsBeyond>
__device__ __forceinline__ int first_beyond(int begin, int end, const IsBeyond& is_beyond) {
  while (begin < end) {
    const int middle = (begin + end) / 2;
    if (is_beyond(middle)) {
      end = middle;
    } else {
      begin = middle + 1;
    }
  }
  return begin;
}

// Calls function(expert, row, end of the expert's rows, segment) for each of the rows begin .. end at which a segment's
// rows begin in an expert.
template <class Function>
__device__ __forceinline__ void for_runs(const ExpertSegmentsArgs& args, int begin, int end, const Function& function) {
  const int experts = static_cast<int>(args.experts);
  const auto start_of = [&](int expert) { return min(max(args.starts[expert], 0), static_cast<int>(args.rows)); };
  const auto owner_of = [&](int row) {
    const int64_t token = args.tokens[row];
    return token >= 0 && token < args.num_tokens ? args.owners[token] : -1;
  };
  int expert = first_beyond(0, experts, [&](int e) { return start_of(e) > begin; }) - 1;
  if (expert < 0) return;  // the first row is nobody's: these are not sorted
  int first = start_of(expert), last = start_of(expert + 1);
  int before = begin > first && begin < end ? owner_of(begin - 1) : -1;
  for (int row = begin; row < end; ++row) {
    while (row >= last && expert + 1 < experts) {
      ++expert;
      first = start_of(expert), last = start_of(expert + 1);
    }
    if (row >= last) return;
    const int owner = owner_of(row);
    if (owner >= 0 && (row == first || owner != before)) function(expert, row, last, owner);
    before = owner;
  }
}

// How many segments name the tokens that this one does, from it on.
__device__ __forceinline__ int layers_from(const ExpertSegmentsArgs& args, int segment) {
  int layers = 1;
  while (layers < args.layers && segment + layers < args.num_segments &&
         same_tokens(args.segments[segment], args.segments[segment + layers]))
    ++layers;
  return layers;
}

// The sum of the numbers of all threads before this one, and of all.
__device__ __forceinline__ int sum_before(int own, int& all) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int sum = own;
  for (int step = 1; step < kWarp; step *= 2) {
    const int more = __shfl_up_sync(kAllLanes, sum, static_cast<unsigned>(step));
    if (lane >= step) sum += more;
  }
  int* sums = reinterpret_cast<int*>(dynamic_shared());
  if (lane == kWarp - 1) sums[warp] = sum;
  __syncthreads();
  int before = sum - own;
  all = 0;
  for (int w = 0; w < kWarps; ++w) {
    before += w < warp ? sums[w] : 0;
    all += sums[w];
  }
  return before;
}

__global__ void __launch_bounds__(kThreads) segments_kernel(const ExpertSegmentsArgs args) {
  find_owners(args);
  const int rows = static_cast<int>(args.rows), each = static_cast<int>(divide_up(rows, kThreads));
  const int begin = min(static_cast<int>(threadIdx.x) * each, rows), end = min(begin + each, rows);
  int own = 0, all;
  for_runs(args, begin, end, [&](int, int, int, int segment) { own += layers_from(args, segment); });
  int64_t place = sum_before(own, all);
  for_runs(args, begin, end, [&](int expert, int row, int last, int segment) {
    const int64_t beyond = args.segments[segment].end;
    const int row_end = first_beyond(row, last, [&](int r) { return args.tokens[r] >= beyond; });
    for (int i = 0, layers = layers_from(args, segment); i < layers && place < args.capacity; ++i, ++place) {
      const LoraSegment& named = args.segments[segment + i];
      args.own[place] = {row, row_end, place, named.weight};
      for (int64_t weight = 0; weight < args.count; ++weight) {
        const LoraTable& table = args.tables[expert * args.count + weight];
        const bool there = table.entries && named.slot >= 0 && named.slot < table.slots;
        args.entries[weight * args.capacity + place] = there ? table.entries[named.slot] : LoraEntry{};
      }
    }
  });
  for (int64_t i = all + static_cast<int64_t>(threadIdx.x); i < args.capacity; i += kThreads) args.own[i] = {};
}

}  // namespace

void expert_segments(const ExpertSegmentsArgs& args, Stream stream) {
  launch(segments_kernel, dim3(args.capacity > 0 ? 1 : 0), dim3(kThreads), sizeof(int) * kWarps, stream, args);
}

}  // namespace quire::cuda
