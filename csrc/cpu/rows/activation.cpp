// Activations of feed-forward layers, alone or times a second half (the gated form). Those with numbers of their own
// follow: gpt-oss's clamped SwiGLU, and xIELU.
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

// The same for bf16, where the result becomes bf16 again: max(x, 0) - z N(z), of z = |x| and the tail N of the normal
// distribution. N is 2^q(z), and 2^f on |f| <= 1/2 is p(f). Both were fitted at Chebyshev nodes, relative error 6e-5,
// and moved by last bits until every bf16 got what Gelu makes of it, but for denormals. N(14.1) leaves nothing.
// Several registers go side by side: one after the other, they would wait for their polynomials.
template <int kCount>
void short_gelu(Vec (&x)[kCount]) {
  constexpr float q[] = {-0.999994516f,   -1.15135241f,   -0.458015233f,   -0.0545600578f, 0.00889682863f,
                         -0.00106986403f, 8.97789578e-5f, -4.91456149e-6f, 1.56537581e-7f, -2.19037766e-9f};
  constexpr float p[] = {0.999999285f, 0.693121791f, 0.240247473f, 0.0559178554f, 0.00957002398f};
  Vec z[kCount], log[kCount], n[kCount], power[kCount];
  const auto each = [](const auto& step) {
#pragma GCC unroll 8
    for (int j = 0; j < kCount; ++j) step(j);
  };
  each([&](int j) { z[j] = min(set1(14.1f), abs(x[j])), log[j] = set1(q[9]); });
#pragma GCC unroll 16
  for (int i = 8; i >= 0; --i) each([&](int j) { log[j] = fma(log[j], z[j], set1(q[i])); });
  each([&](int j) { n[j] = round(log[j]); });
  each([&](int j) { log[j] = sub(log[j], n[j]), power[j] = set1(p[4]); });
#pragma GCC unroll 16
  for (int i = 3; i >= 0; --i) each([&](int j) { power[j] = fma(power[j], log[j], set1(p[i])); });
  each([&](int j) { x[j] = sub(max(zero(), x[j]), mul(z[j], scale_by_power(power[j], n[j]))); });
}

struct Relu2 {
  Vec operator()(Vec x) const {
    const Vec positive = max(zero(), x);
    return mul(positive, positive);
  }
};
struct Relu6 {
  Vec operator()(Vec x) const { return min(set1(6.0f), max(zero(), x)); }
};
struct Sigmoid {
  Vec operator()(Vec x) const { return sigmoid(x); }
};
struct Tanh {
  Vec operator()(Vec x) const { return tanh(x); }
};

// x tanh(ln(1 + e)), of e = e^x, is x s / (s + 2) with s = e (e + 2). Above 20 that is x.
struct Mish {
  Vec operator()(Vec x) const {
    const Vec e = exp(min(set1(20.0f), x));
    const Vec s = mul(e, add(e, set1(2.0f)));
    return mul(x, div(s, add(s, set1(2.0f))));
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

// For each row of x without a second half.
void short_gelu_rows(const ActivationArgs& args) {
  constexpr int kCount = 4, kWidth = kCount * kLanes;
  parallel_for(args.tokens, kGrainElements / (args.channels + 1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const bf16* x = static_cast<const bf16*>(args.x) + t * args.x_stride;
      bf16* y = static_cast<bf16*>(args.y) + t * args.channels;
      int64_t c = 0;
      for (; c + kWidth <= args.channels; c += kWidth) {
        Vec v[kCount];
        for (int j = 0; j < kCount; ++j) v[j] = load(x + c + j * kLanes);
        short_gelu(v);
        for (int j = 0; j < kCount; ++j) store(y + c + j * kLanes, v[j]);
      }
      for (; c < args.channels; c += kLanes) {
        const int n = static_cast<int>(args.channels - c < kLanes ? args.channels - c : kLanes);
        Vec v[] = {load_first(x + c, n)};
        short_gelu(v);
        store_first(y + c, v[0], n);
      }
    }
  });
}

template <class T>
void activation_as(const ActivationArgs& args) {
  switch (args.kind) {
    case Activation::silu: return rows<T>(args, Silu{});
    case Activation::relu: return rows<T>(args, Relu{});
    case Activation::gelu:
      if constexpr (__is_same(T, bf16))
        if (!args.gated) return short_gelu_rows(args);
      return rows<T>(args, Gelu{});
    case Activation::gelu_tanh: return rows<T>(args, GeluTanh{});
    case Activation::quick_gelu: return rows<T>(args, QuickGelu{});
    case Activation::relu2: return rows<T>(args, Relu2{});
    case Activation::relu6: return rows<T>(args, Relu6{});
    case Activation::sigmoid: return rows<T>(args, Sigmoid{});
    case Activation::tanh: return rows<T>(args, Tanh{});
    case Activation::mish: return rows<T>(args, Mish{});
  }
}

// Each row of y from that of x: step(x, c, n) makes elements c .. c + n of it.
template <class T, class Args, class Step>
void each_row(const Args& args, const Step& step) {
  parallel_for(args.tokens, kGrainElements / (args.channels + 1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* x = static_cast<const T*>(args.x) + t * args.x_stride;
      T* y = static_cast<T*>(args.y) + t * args.channels;
      for (int64_t c = 0; c < args.channels; c += kLanes) {
        const int n = static_cast<int>(args.channels - c < kLanes ? args.channels - c : kLanes);
        store_first(y + c, step(x, c, n), n);
      }
    }
  });
}

template <class T>
void clamped_swiglu_as(const ClampedSwigluArgs& args) {
  const Vec alpha = set1(args.alpha), most = set1(args.limit), least = set1(-args.limit), one = set1(1.0f);
  each_row<T>(args, [&](const T* x, int64_t c, int n) {
    Vec gate, up;
    if (args.interleaved) {
      const int n0 = 2 * n < kLanes ? 2 * n : kLanes;
      const Vec x0 = load_first(x + 2 * c, n0), x1 = load_first(x + 2 * c + n0, 2 * n - n0);
      gate = evens(x0, x1), up = odds(x0, x1);
    } else {
      gate = load_first(x + c, n), up = load_first(x + args.channels + c, n);
    }
    gate = min(most, gate), up = max(least, min(most, up));
    return mul(add(up, one), mul(gate, sigmoid(mul(gate, alpha))));
  });
}

template <class T>
float number(const void* at) {
  float lanes[kLanes];
  store(lanes, load_first(static_cast<const T*>(at), 1));
  return lanes[0];
}

float softplus(float x) { return static_cast<float>(x > 20 ? x : __builtin_log1p(__builtin_exp(x))); }

template <class T>
void xielu_as(const XieluArgs& args) {
  const Vec beta = set1(*args.beta), eps = set1(*args.eps), positive = set1(softplus(number<T>(args.alpha_p)));
  const Vec negative = set1(*args.beta + softplus(number<T>(args.alpha_n)));
  each_row<T>(args, [&](const T* x, int64_t c, int n) {
    const Vec v = load_first(x + c, n);
    const Vec above = mul(mul(positive, v), v), below = mul(sub(expm1(min(eps, v)), v), negative);
    return add(select_negative(sub(zero(), v), above, below), mul(beta, v));
  });
}

}  // namespace

void clamped_swiglu(const ClampedSwigluArgs& args) {
  switch (args.dtype) {
    case DType::float32: return clamped_swiglu_as<float>(args);
    case DType::bfloat16: return clamped_swiglu_as<bf16>(args);
    case DType::float16: return clamped_swiglu_as<fp16>(args);
  }
}

void xielu(const XieluArgs& args) {
  switch (args.dtype) {
    case DType::float32: return xielu_as<float>(args);
    case DType::bfloat16: return xielu_as<bf16>(args);
    case DType::float16: return xielu_as<fp16>(args);
  }
}

void activation(const ActivationArgs& args) {
  switch (args.dtype) {
    case DType::float32: return activation_as<float>(args);
    case DType::bfloat16: return activation_as<bf16>(args);
    case DType::float16: return activation_as<fp16>(args);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
