// A weight's rows, turned once for all products by linear_columns.h: in place, a group of rows at a time.
#include <string.h>

#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"
#include "cpu/common/scratch.h"
#include "cpu/common/split_pairs.h"
#include "cpu/linear/columns.h"

namespace quire {
namespace QUIRE_ISA {

// Where the matrix unit multiplies, or floats do, rows are best as they lie. Elements of 32 bits would gain less than
// half as much: they are not packed.
bool packs_rows(DType dtype) {
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
  return dtype == DType::bfloat16 && !splits_pairs(INT64_MAX);
#else
  (void)dtype;
  return false;
#endif
}

void pack_rows([[maybe_unused]] const PackArgs& args) {
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
  using C = Columns<bf16>;
  struct Group;
  const int64_t steps = C::steps(args.features), size = C::kRows * args.features;
  constexpr int64_t kGrain = 1 << 16;  // elements, about 10 microseconds
  parallel_for(args.rows / C::kRows, kGrain / size, [&](int64_t begin, int64_t end) {
    float* turned = scratch<float, Group>(size / 2);
    for (int64_t i = begin; i < end; ++i) {
      bf16* rows = static_cast<bf16*>(args.w) + i * size;
      C::turn_group(rows, C::kRows, args.features, C::packed_chain(steps), turned);
      memcpy(rows, turned, size * sizeof(bf16));
    }
  });
#endif
}

}  // namespace QUIRE_ISA
}  // namespace quire
