// Sums of each sequence's rows, one row after the other, so that no cut of a sequence changes a bit.
#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"
#include "cpu/common/simd.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int64_t kPanel = 256;                // channels of a task: their sums fit the first-level cache
constexpr int64_t kGrainElements = 16 * 1024;  // about 5 microseconds on one core

template <class T>
void sum_as(const SumRowsArgs& args) {
  const int64_t panels = (args.channels + kPanel - 1) / kPanel;
  const int64_t each = args.sequences ? args.tokens / args.sequences + 1 : 1;
  parallel_for(args.sequences * panels, kGrainElements / (each * kPanel) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t sequence = task / panels, first = task % panels * kPanel;
      const int64_t count = args.channels - first < kPanel ? args.channels - first : kPanel;
      double* sums = args.sums + sequence * args.channels + first;
      float row[kPanel];
      for (int64_t t = args.query_start[sequence]; t < args.query_start[sequence + 1]; ++t) {
        const T* x = static_cast<const T*>(args.x) + t * args.x_stride + first;
        for (int64_t c = 0; c < count; c += kLanes) {
          const int n = static_cast<int>(count - c < kLanes ? count - c : kLanes);
          store_first(row + c, load_first(x + c, n), n);
        }
        for (int64_t c = 0; c < count; ++c) sums[c] += row[c];
      }
    }
  });
}

}  // namespace

void sum_rows(const SumRowsArgs& args) {
  switch (args.dtype) {
    case DType::float32: return sum_as<float>(args);
    case DType::bfloat16: return sum_as<bf16>(args);
    case DType::float16: return sum_as<fp16>(args);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
