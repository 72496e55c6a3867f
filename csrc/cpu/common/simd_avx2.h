// Sixteen floats in two ymm registers. Included by simd.h only, inside its namespace.

struct Vec {
  __m256 lo, hi;
};

inline Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec set1(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }

inline __m256 widen8(__m128i bits, bf16) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline __m256 widen8(__m128i bits, fp16) { return _mm256_cvtph_ps(bits); }

inline __m128i narrow8(__m256 a, bf16) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}
inline __m128i narrow8(__m256 a, fp16) { return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
template <class Half>
inline Vec load(const Half* p) {
  const __m128i* bits = reinterpret_cast<const __m128i*>(p);
  return {widen8(_mm_loadu_si128(bits), Half{}), widen8(_mm_loadu_si128(bits + 1), Half{})};
}
inline __m256 widen8(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }
inline Vec load(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {widen8(bytes), widen8(_mm_unpackhi_epi64(bytes, bytes))};
}
inline void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
template <class Half>
inline void store(Half* p, Vec a) {
  __m128i* bits = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(bits, narrow8(a.lo, Half{}));
  _mm_storeu_si128(bits + 1, narrow8(a.hi, Half{}));
}
inline void store(int8_t* p, Vec a) {
  const __m256i lo = _mm256_cvtps_epi32(a.lo), hi = _mm256_cvtps_epi32(a.hi);
  const __m128i first = _mm_packs_epi32(_mm256_castsi256_si128(lo), _mm256_extracti128_si256(lo, 1));
  const __m128i last = _mm_packs_epi32(_mm256_castsi256_si128(hi), _mm256_extracti128_si256(hi, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(first, last));
}

inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Vec abs(Vec a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline Vec round(Vec a) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, nearest), _mm256_round_ps(a.hi, nearest)};
}
inline Vec select_negative(Vec sign, Vec a, Vec b) {
  const __m256 o = _mm256_setzero_ps();
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_cmp_ps(sign.lo, o, _CMP_LT_OQ)),
          _mm256_blendv_ps(b.hi, a.hi, _mm256_cmp_ps(sign.hi, o, _CMP_LT_OQ))};
}
template <int kWhich>
inline __m256 every_other8(__m256 a, __m256 b) {
  const __m256d mixed = _mm256_castps_pd(_mm256_shuffle_ps(a, b, kWhich));  // a's first two, b's, a's last two, b's
  return _mm256_castpd_ps(_mm256_permute4x64_pd(mixed, 0xd8));
}
inline Vec evens(Vec a, Vec b) { return {every_other8<0x88>(a.lo, a.hi), every_other8<0x88>(b.lo, b.hi)}; }
inline Vec odds(Vec a, Vec b) { return {every_other8<0xdd>(a.lo, a.hi), every_other8<0xdd>(b.lo, b.hi)}; }
inline Vec zip8(__m256 a, __m256 b) {
  const __m256 low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
  return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}
inline void zip(Vec a, Vec b, Vec* ab) {
  ab[0] = zip8(a.lo, b.lo);
  ab[1] = zip8(a.hi, b.hi);
}
inline Vec keep_first(Vec a, int n, Vec rest) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i lo = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane);
  const __m256i hi = _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lane);
  return {_mm256_blendv_ps(rest.lo, a.lo, _mm256_castsi256_ps(lo)),
          _mm256_blendv_ps(rest.hi, a.hi, _mm256_castsi256_ps(hi))};
}

inline __m256 scale8(__m256 a, __m256 n) {
  // In two halves, so that neither factor leaves the range of a normal float.
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
  const __m256i bias = _mm256_set1_epi32(127), rest = _mm256_sub_epi32(whole, half);
  const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i second = _mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(a, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second));
}
// a times two to the power n, n a whole number in [-150, 128].
inline Vec scale_by_power(Vec a, Vec n) { return {scale8(a.lo, n.lo), scale8(a.hi, n.hi)}; }

inline float reduce_add(Vec a) {
  const __m256 e = _mm256_add_ps(a.lo, a.hi);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
inline float reduce_max(Vec a) {
  const __m256 e = _mm256_max_ps(a.lo, a.hi);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
