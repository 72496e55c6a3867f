// Sums and multiples of rows, and soft and hard limits on them.
#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"
#include "cpu/common/simd.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int64_t kGrainElements = 16384;  // about 5 microseconds on one core

template <class T>
void add_as(const AddArgs& args) {
  const Vec scale = set1(args.scale);
  parallel_for(args.tokens, kGrainElements / (args.channels + 1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* x = static_cast<const T*>(args.x) + t * args.x_stride;
      const T* added = static_cast<const T*>(args.added) + t * args.added_stride;
      T* y = static_cast<T*>(args.y) + t * args.channels;
      for (int64_t c = 0; c < args.channels; c += kLanes) {
        const int n = static_cast<int>(args.channels - c < kLanes ? args.channels - c : kLanes);
        store_first(y + c, add(load_first(x + c, n), mul(load_first(added + c, n), scale)), n);
      }
    }
  });
}

template <class T>
void scale_as(const ScaleArgs& args) {
  const Vec cap = set1(args.cap), most = set1(args.limit), least = set1(-args.limit);
  const bool capped = args.cap != 0, limited = args.limit != 0;
  parallel_for(args.tokens, kGrainElements / (args.channels + 1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* x = static_cast<const T*>(args.x) + t * args.x_stride;
      T* y = static_cast<T*>(args.y) + t * args.channels;
      const Vec factor = set1(args.rows ? args.factor * args.rows[t] : args.factor);
      for (int64_t c = 0; c < args.channels; c += kLanes) {
        const int n = static_cast<int>(args.channels - c < kLanes ? args.channels - c : kLanes);
        Vec v = mul(load_first(x + c, n), factor);
        if (capped) v = mul(tanh(div(v, cap)), cap);
        if (limited) v = max(least, min(most, v));  // a NaN stays one
        store_first(y + c, v, n);
      }
    }
  });
}

}  // namespace

void add(const AddArgs& args) {
  switch (args.dtype) {
    case DType::float32: return add_as<float>(args);
    case DType::bfloat16: return add_as<bf16>(args);
    case DType::float16: return add_as<fp16>(args);
  }
}

void scale(const ScaleArgs& args) {
  switch (args.dtype) {
    case DType::float32: return scale_as<float>(args);
    case DType::bfloat16: return scale_as<bf16>(args);
    case DType::float16: return scale_as<fp16>(args);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
