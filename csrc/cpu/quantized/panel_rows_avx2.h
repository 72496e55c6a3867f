// Rows of groups made ready for many tokens: kPanelRows rows, group by group, eight of them side by side in a register.
#pragma once

#include "cpu/quantized/strips.h"

#if QUIRE_WIDE == 32

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int kSides = 2, kSideRows = 8, kPanelRows = kSideRows * kSides, kChains = 4;
constexpr int kPanelTokens = kSignedBytes ? 4 : 6;

// A group of a panel's rows, eight on each side. Of `codes`, four columns each.
template <bool kHalves>
struct alignas(32) PanelGroup {
  __m256i codes[kSides][8];
  __m256 scale[kSides], minimum[kSides];
};
template <>
struct alignas(32) PanelGroup<true> {
  __m256i codes[kSides][8];
  __m256 scale[kSides], minimum[kSides];
  __m256i factors[kSides][2];
  __m256i low[kSides];  // of both halves, 16 bits each
};

// kOwnFit: so many times four products of two neighbours suffice 16 bits; of signed codes, one.
template <bool kOwnHalves, bool kOwnMinimum, int kOwnFit>
struct PanelForm {
  static constexpr bool kHalves = kOwnHalves, kMinimum = kOwnMinimum;
  static constexpr int kFit = kOwnFit;
};

// Four columns kFirst .. of a group's eight times those of some tokens.
template <class Form, int kFirst, int kQuads, int kCount>
inline __attribute__((always_inline)) void add_quads(const __m256i (*codes)[8], const int* x, __m256i (*sums)[kSides]) {
#if defined(QUIRE_HAS_DPBUSD)
#pragma GCC unroll 16
  for (int q = kFirst; q < kFirst + kQuads; ++q) {
    const __m256i own[] = {codes[0][q], codes[1][q]};
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      const __m256i four = all_lanes(x[kPanelTokens * q + i]);
      sums[i][0] = add_products(sums[i][0], own[0], four);
      sums[i][1] = add_products(sums[i][1], own[1], four);
    }
  }
#else
  constexpr bool kSigned = Form::kFit == 1;
  constexpr int kAtOnce = Form::kFit < kQuads ? Form::kFit : kQuads;
#pragma GCC unroll 16
  for (int first = kFirst; first < kFirst + kQuads; first += kAtOnce) {
    __m256i pairs[kCount][kSides];
#pragma GCC unroll 16
    for (int q = first; q < first + kAtOnce; ++q) {
      const __m256i own[] = {codes[0][q], codes[1][q]};
#pragma GCC unroll 16
      for (int i = 0; i < kCount; ++i) {
        const __m256i four = all_lanes(x[kPanelTokens * q + i]);
#pragma GCC unroll 2
        for (int side = 0; side < kSides; ++side) {
          const __m256i two = pairs_of_products<kSigned>(own[side], four);
          pairs[i][side] = q == first ? two : in_order(_mm256_add_epi16(pairs[i][side], two));
        }
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i)
#pragma GCC unroll 2
      for (int side = 0; side < kSides; ++side)
        sums[i][side] = in_order(_mm256_add_epi32(sums[i][side], sums_of_pairs(pairs[i][side])));
  }
#endif
}

// Number `at` of a panel's rows, sixteen at a time.
template <class Sides>
inline Vec sixteen(const Sides& sides, int64_t) {
#if defined(__AVX512F__)
  return {_mm512_insertf32x8(_mm512_castps256_ps512(sides(0)), sides(1), 1)};
#else
  return {sides(0), sides(1)};
#endif
}

// Lanes row, row + 4 of registers 0 to 3 become those of one group: four numbers of each row, by group.
inline void turn_fours(const __m256i* rows, __m256i* to) {
  const __m256i ab = _mm256_unpacklo_epi32(rows[0], rows[1]), ab2 = _mm256_unpackhi_epi32(rows[0], rows[1]);
  const __m256i cd = _mm256_unpacklo_epi32(rows[2], rows[3]), cd2 = _mm256_unpackhi_epi32(rows[2], rows[3]);
  to[0] = _mm256_unpacklo_epi64(ab, cd), to[1] = _mm256_unpackhi_epi64(ab, cd);
  to[2] = _mm256_unpacklo_epi64(ab2, cd2), to[3] = _mm256_unpackhi_epi64(ab2, cd2);
}

// Eight rows of 32 bytes: four bytes of all rows in each register.
inline void turn_rows(const __m256i* const* rows, int number, __m256i* to) {
  __m256i fours[4];
  for (int half = 0; half < 2; ++half) {
    for (int r = 0; r < 4; ++r) {
      const auto own = [&](int row) { return load16(reinterpret_cast<const __m128i*>(rows[row] + number) + half); };
      fours[r] = _mm256_inserti128_si256(_mm256_castsi128_si256(own(r)), own(r + 4), 1);
    }
    turn_fours(fours, to + 4 * half);
  }
}

// A panel, [kChains][steps].
template <class Kind>
class Panel {
  static constexpr int most() { return Steps<Kind>::kMost < 0 ? -Steps<Kind>::kMost : Steps<Kind>::kMost; }
  static constexpr int fit() {
    const int times = kSignedBytes ? 32767 / (2 * 127 * most()) : 8;
    return times >= 8 ? 8 : times >= 4 ? 4 : times >= 2 ? 2 : 1;
  }

 public:
  using Group = PanelGroup<Kind::kHalves>;
  using Form = PanelForm<Kind::kHalves, Kind::kMinimum, fit()>;

  Panel(Group* groups, int64_t steps) : groups_(groups), steps_(steps) {}

  const Group* chain(int64_t number) const { return groups_ + number * steps_; }

  // Rows first .. first + count, or as many as a panel has; past the last, the last again.
  void take(const uint8_t* first, int64_t row_bytes, int64_t count, int64_t features) const {
    const uint8_t* rows[kPanelRows];
    for (int r = 0; r < kPanelRows; ++r) rows[r] = first + (r < count ? r : count - 1) * row_bytes;
    for (int side = 0; side < kSides; ++side) {
      const StepRows own[] = {StepRows(rows + kSideRows * side), StepRows(rows + kSideRows * side + kStepRows)};
      const StepReader<Kind> readers[] = {{own[0], features}, {own[1], features}};
      for (int64_t number = 0; number < steps_; ++number) {
        Step<Kind::kHalves> parts[2];
        readers[0].take(number, parts), readers[1].take(number, parts + 1);
        put(parts, groups_ + number, side);
      }
    }
  }

 private:
  using Parts = Step<Kind::kHalves>[2];

  void put(const Parts& parts, Group* to, int side) const {
    const __m256i* rows[kSideRows];
    for (int r = 0; r < kSideRows; ++r) rows[r] = parts[r / kStepRows].codes[r % kStepRows];
    for (int g = 0; g < kStepGroups; ++g) turn_rows(rows, g, to[g * steps_].codes[side]);
    const auto scale = [&](int part, int pair) { return _mm256_castps_si256(parts[part].scale[pair]); };
    by_rows(to, scale, [&](Group& group, __m256i all) { group.scale[side] = _mm256_castsi256_ps(all); });
    const auto minimum = [&](int part, int pair) { return _mm256_castps_si256(parts[part].minimum[pair]); };
    if constexpr (Kind::kMinimum)
      by_rows(to, minimum, [&](Group& group, __m256i all) { group.minimum[side] = _mm256_castsi256_ps(all); });
    if constexpr (Kind::kHalves) put_factors(parts, to, side);
  }

  void put_factors(const Parts& parts, Group* to, int side) const {
    __m256i all[2][kStepGroups];
    by_halves(parts[0].factors, parts[1].factors, all);
    for (int g = 0; g < kStepGroups; ++g)
      for (int half = 0; half < 2; ++half) to[g * steps_].factors[side][half] = all[half][g];
    if constexpr (Kind::kMinimum) {
      by_halves(parts[0].low, parts[1].low, all);
      for (int g = 0; g < kStepGroups; ++g)
        to[g * steps_].low[side] = _mm256_or_si256(all[0][g], _mm256_slli_epi32(all[1][g], 16));
    }
  }

  // get: lanes 4 * row + group of a pair of rows of a part.
  template <class Get, class Set>
  void by_rows(Group* to, const Get& get, const Set& set) const {
    __m256i rows[4], groups[kStepGroups];
    for (int pair = 0; pair < 2; ++pair) {
      rows[2 * pair] = _mm256_permute2x128_si256(get(0, pair), get(1, pair), 0x20);
      rows[2 * pair + 1] = _mm256_permute2x128_si256(get(0, pair), get(1, pair), 0x31);
    }
    turn_fours(rows, groups);
    for (int g = 0; g < kStepGroups; ++g) set(to[g * steps_], groups[g]);
  }

  static void by_halves(const __m256i* upper, const __m256i* lower, __m256i (*to)[kStepGroups]) {
    __m256i rows[2][4];
    for (int r = 0; r < 4; ++r) {
      rows[0][r] = _mm256_permute2x128_si256(upper[r], lower[r], 0x20);
      rows[1][r] = _mm256_permute2x128_si256(upper[r], lower[r], 0x31);
    }
    turn_fours(rows[0], to[0]), turn_fours(rows[1], to[1]);
  }

  Group* const groups_;
  const int64_t steps_;
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

#endif
