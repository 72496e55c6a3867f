// All tokens' rows in the order of their experts: a counting sort without a word between blocks. Each expert's block
// goes through all choices by itself: there are few, and they lie in the cache. So it knows where its rows begin, and
// puts them in the order of their tokens.
#include "cuda/common/kernels.h"

namespace quire::cuda {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = kWarp * kWarps;

__global__ void __launch_bounds__(kThreads) sort_kernel(const SortByExpertArgs args) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int expert = static_cast<int>(blockIdx.x), count = static_cast<int>(args.experts_count);
  const int chosen = static_cast<int>(args.chosen), choices = static_cast<int>(args.num_tokens) * chosen;
  // A warp takes choices that follow each other.
  const int each = static_cast<int>(divide_up(choices, kThreads)) * kWarp;
  const int begin = min(warp * each, choices), end = min(begin + each, choices);
  const auto choice_at = [&](int i) { return i < end ? args.experts[i] : -1; };

  int own = 0, lower = 0;  // choices of this expert, and of those with lower numbers
  for (int i = begin; i < end; i += kWarp) {
    const int choice = choice_at(i + lane);
    own += __popc(__ballot_sync(kAllLanes, choice == expert));
    lower += __popc(__ballot_sync(kAllLanes, choice >= 0 && choice < expert));
  }
  int* owns = reinterpret_cast<int*>(dynamic_shared());
  int* lowers = owns + kWarps;
  if (lane == 0) owns[warp] = own, lowers[warp] = lower;
  __syncthreads();
  int start = 0, before = 0, all = 0;
  for (int w = 0; w < kWarps; ++w) {
    start += lowers[w];
    before += w < warp ? owns[w] : 0;
    all += owns[w];
  }
  if (threadIdx.x == 0) {
    args.starts[expert] = start;
    if (expert + 1 == count) args.starts[count] = start + all;
  }
  int place = start + before;
  for (int i = begin; i < end; i += kWarp) {
    const int choice = choice_at(i + lane);
    const unsigned same = __ballot_sync(kAllLanes, choice == expert);
    if (choice == expert) {
      const int row = place + __popc(same & ((1u << lane) - 1));
      args.tokens[row] = (i + lane) / chosen;
      args.places[i + lane] = row;
    } else if (expert == 0 && i + lane < end && (choice < 0 || choice >= count)) {
      args.places[i + lane] = -1;
    }
    place += __popc(same);
  }
}

}  // namespace

void sort_by_expert(const SortByExpertArgs& args, Stream stream) {
  launch(sort_kernel, dim3(static_cast<unsigned>(args.experts_count)), dim3(kThreads), 2 * sizeof(int) * kWarps, stream,
         args);
}

}  // namespace quire::cuda
