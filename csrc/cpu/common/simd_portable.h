// Sixteen floats in the compiler's own vector type, which it splits over whatever registers the target has.
// Included by simd.h only, inside its namespace.

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

struct Vec {
  Floats v;
};

inline Vec zero() { return {Floats{}}; }
inline Vec set1(float a) { return {a - Floats{}}; }

inline Bits choose(Ints mask, Bits a, Bits b) { return ((Bits)mask & a) | (~(Bits)mask & b); }

inline Vec widen(Halves h, bf16) { return {(Floats)(__builtin_convertvector(h, Bits) << 16)}; }

inline Vec widen(Halves h, fp16) {
  const Bits bits = __builtin_convertvector(h, Bits);
  // The product rebiases the exponent from 15 to 127, subnormals included; only infinity and NaN need help.
  const Bits scaled = (Bits)((Floats)((bits & 0x7fff) << 13) * 0x1p112f);
  const Bits special = (Bits)((bits & 0x7c00) == 0x7c00) & 0x7f800000;
  return {(Floats)(scaled | special | ((bits & 0x8000) << 16))};
}

inline Halves narrow(Vec a, bf16) {
  const Bits bits = (Bits)a.v;
  const Bits rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return __builtin_convertvector(choose(a.v != a.v, bits | 0x00400000, rounded) >> 16, Halves);
}

inline Halves narrow(Vec a, fp16) {
  const Bits sign = ((Bits)a.v >> 16) & 0x8000, bits = (Bits)a.v & 0x7fffffff;
  // Below 2^-14 the result is subnormal: adding 0.5 leaves its 2^-24 units, rounded, in the low bits.
  const Bits subnormal = (Bits)((Floats)bits + 0.5f) - 0x3f000000;
  const Bits normal = (bits - (112u << 23) + 0xfff + ((bits >> 13) & 1)) >> 13;
  Bits half = choose((Ints)bits < 0x38800000, subnormal, normal);
  half = choose((Ints)bits >= 0x477ff000, Bits{} + 0x7c00, half);
  half = choose((Ints)bits > 0x7f800000, Bits{} + 0x7e00, half);
  return __builtin_convertvector(half | sign, Halves);
}

inline Vec load(const float* p) {
  Vec a;
  __builtin_memcpy(&a.v, p, sizeof a.v);
  return a;
}
template <class Half>
inline Vec load(const Half* p) {
  Halves h;
  __builtin_memcpy(&h, p, sizeof h);
  return widen(h, Half{});
}
inline Vec load(const int8_t* p) {
  Bytes bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  return {__builtin_convertvector(bytes, Floats)};
}
inline void store(float* p, Vec a) { __builtin_memcpy(p, &a.v, sizeof a.v); }
template <class Half>
inline void store(Half* p, Vec a) {
  const Halves h = narrow(a, Half{});
  __builtin_memcpy(p, &h, sizeof h);
}

inline Vec add(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec sub(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec mul(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec div(Vec a, Vec b) { return {a.v / b.v}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
inline Vec max(Vec a, Vec b) { return {(Floats)choose(a.v > b.v, (Bits)a.v, (Bits)b.v)}; }
inline Vec min(Vec a, Vec b) { return {(Floats)choose(a.v < b.v, (Bits)a.v, (Bits)b.v)}; }
inline Vec abs(Vec a) { return {(Floats)((Bits)a.v & 0x7fffffff)}; }
// Adding and taking away 1.5 * 2^23 leaves no room for a fraction. Holds for |a| < 2^22.
inline Vec round(Vec a) { return {(a.v + 0x1.8p23f) - 0x1.8p23f}; }
inline void store(int8_t* p, Vec a) {
  const Bytes bytes = __builtin_convertvector((Ints)(a.v + 0x1.8p23f), Bytes);  // the last bits are the whole number's
  __builtin_memcpy(p, &bytes, sizeof bytes);
}
inline Vec select_negative(Vec sign, Vec a, Vec b) { return {(Floats)choose(sign.v < 0.0f, (Bits)a.v, (Bits)b.v)}; }
inline Vec every_other(Vec a, Vec b, int first) {
  Vec result;
  for (int i = 0; i < 8; ++i) {
    result.v[i] = a.v[2 * i + first];
    result.v[8 + i] = b.v[2 * i + first];
  }
  return result;
}
inline Vec evens(Vec a, Vec b) { return every_other(a, b, 0); }
inline Vec odds(Vec a, Vec b) { return every_other(a, b, 1); }
inline void zip(Vec a, Vec b, Vec* ab) {
  for (int i = 0; i < 32; ++i) ab[i / 16].v[i % 16] = (i % 2 ? b : a).v[i / 2];
}
inline Vec keep_first(Vec a, int n, Vec rest) {
  const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return {(Floats)choose(lane < n, (Bits)a.v, (Bits)rest.v)};
}

// a times two to the power n, n a whole number in [-150, 128].
inline Vec scale_by_power(Vec a, Vec n) {
  // In two halves, so that neither factor leaves the range of a normal float. A NaN's exponent is of no matter.
  const Ints whole = (Ints)(n.v + 0x1.8p23f) - 0x4b400000, half = whole >> 1;
  const Floats first = (Floats)((Bits)(half + 127) << 23), second = (Floats)((Bits)(whole - half + 127) << 23);
  return {a.v * first * second};
}

inline float reduce_add(Vec a) {
  float x[16];
  __builtin_memcpy(x, &a.v, sizeof x);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) x[i] += x[i + width];
  return x[0];
}
inline float reduce_max(Vec a) {
  float x[16];
  __builtin_memcpy(x, &a.v, sizeof x);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
  return x[0];
}
