// Sixteen floats in one zmm register. Included by simd.h only, inside its namespace.

struct Vec {
  __m512 v;
};

inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }

inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec set1(float a) { return {_mm512_set1_ps(a)}; }

inline Vec widen(__m256i bits, bf16) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
inline Vec widen(__m256i bits, fp16) { return {_mm512_cvtph_ps(bits)}; }
#if defined(__AVX512BF16__)
inline __m256i narrow(Vec a, bf16) { return (__m256i)_mm512_cvtneps_pbh(a.v); }
#else
inline __m256i narrow(Vec a, bf16) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));  // NaN must stay NaN
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16));
}
#endif
inline __m256i narrow(Vec a, fp16) { return _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
template <class Half>
inline Vec load(const Half* p) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), Half{});
}
inline Vec widen(__m128i bytes) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))}; }
inline Vec load(const int8_t* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vec load_first(const int8_t* p, int n) { return widen(_mm_maskz_loadu_epi8(first_lanes(n), p)); }
inline Vec load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
template <class Half>
inline Vec load_first(const Half* p, int n) {
  return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p), Half{});
}

inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
template <class Half>
inline void store(Half* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a, Half{}));
}
inline void store(int8_t* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
inline void store_first(int8_t* p, Vec a, int n) {
  _mm512_mask_cvtepi32_storeu_epi8(p, first_lanes(n), _mm512_cvtps_epi32(a.v));
}
inline void store_first(float* p, Vec a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
template <class Half>
inline void store_first(Half* p, Vec a, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(a, Half{}));
}

inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
inline Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec select_negative(Vec sign, Vec a, Vec b) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(sign.v, _mm512_setzero_ps(), _CMP_LT_OQ), b.v, a.v)};
}
inline Vec evens(Vec a, Vec b) {
  const __m512i lanes = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  return {_mm512_permutex2var_ps(a.v, lanes, b.v)};
}
inline Vec odds(Vec a, Vec b) {
  const __m512i lanes = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  return {_mm512_permutex2var_ps(a.v, lanes, b.v)};
}
inline void zip(Vec a, Vec b, Vec* ab) {
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i second = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  ab[0].v = _mm512_permutex2var_ps(a.v, first, b.v);
  ab[1].v = _mm512_permutex2var_ps(a.v, second, b.v);
}
inline Vec keep_first(Vec a, int n, Vec rest) { return {_mm512_mask_blend_ps(first_lanes(n), rest.v, a.v)}; }

// a times two to the power n, n a whole number in [-150, 128].
inline Vec scale_by_power(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }

inline float reduce_add(Vec a) {
  __m256 e = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
inline float reduce_max(Vec a) {
  __m256 e = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
