// Activations of feed-forward layers, alone or times a second half (the gated form).
#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"
#include "cpu/common/simd.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int64_t kGrainElements = 8192;  // about 5 microseconds on one core

struct Silu {
  Vec operator()(Vec x) const { return mul(x, sigmoid(x)); }
};
struct Relu {
  Vec operator()(Vec x) const { return max(zero(), x); }  // in this order a NaN stays one
};
struct QuickGelu {
  Vec operator()(Vec x) const { return mul(x, sigmoid(mul(x, set1(1.702f)))); }
};

// x (1 + tanh(u)) / 2 is x sigmoid(2 u).
struct GeluTanh {
  Vec operator()(Vec x) const {
    const Vec cube = mul(mul(x, x), x);
    return mul(x, sigmoid(mul(set1(1.5957691216f), fma(cube, set1(0.044715f), x))));
  }
};

// x times the normal distribution function. The smaller tail is exp(-x^2 / 2) t p(t) / 2 with t = 1 / (1 + 0.34 z),
// z = |x| / sqrt(2); p fitted at Chebyshev nodes on 0 <= z <= 10, relative error 5e-9. No cancellation for x < 0.
struct Gelu {
  Vec operator()(Vec x) const {
    constexpr float p[] = {0.19181533f, 0.19206187f,  0.17805301f, 0.17591454f,  0.05628457f,
                           0.2814596f,  -0.28562951f, 0.40729803f, -0.24842322f, 0.05116579f};
    const Vec t = div(set1(1.0f), fma(abs(x), set1(0.34f * 0.70710678f), set1(1.0f)));
    Vec sum = set1(p[9]);
    for (int i = 8; i >= 0; --i) sum = fma(sum, t, set1(p[i]));
    const Vec tail = mul(mul(exp(mul(mul(x, x), set1(-0.5f))), set1(0.5f)), mul(t, sum));
    return mul(x, select_negative(x, tail, sub(set1(1.0f), tail)));
  }
};

template <class T, class Function>
void rows(const ActivationArgs& args, const Function& function) {
  parallel_for(args.tokens, kGrainElements / (args.channels + 1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* x = static_cast<const T*>(args.x) + t * args.x_stride;
      const T* factor = args.gated ? x + args.channels : nullptr;
      T* y = static_cast<T*>(args.y) + t * args.channels;
      int64_t c = 0;
      for (; c + kLanes <= args.channels; c += kLanes) {
        const Vec v = function(load(x + c));
        store(y + c, factor ? mul(v, load(factor + c)) : v);
      }
      const int rest = static_cast<int>(args.channels - c);
      if (rest) {
        const Vec v = function(load_first(x + c, rest));
        store_first(y + c, factor ? mul(v, load_first(factor + c, rest)) : v, rest);
      }
    }
  });
}

template <class T>
void activation_as(const ActivationArgs& args) {
  switch (args.kind) {
    case Activation::silu: return rows<T>(args, Silu{});
    case Activation::relu: return rows<T>(args, Relu{});
    case Activation::gelu: return rows<T>(args, Gelu{});
    case Activation::gelu_tanh: return rows<T>(args, GeluTanh{});
    case Activation::quick_gelu: return rows<T>(args, QuickGelu{});
  }
}

}  // namespace

void activation(const ActivationArgs& args) {
  switch (args.dtype) {
    case DType::float32: return activation_as<float>(args);
    case DType::bfloat16: return activation_as<bf16>(args);
    case DType::float16: return activation_as<fp16>(args);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
