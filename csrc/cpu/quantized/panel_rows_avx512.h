// Rows of groups made ready for many tokens: kPanelRows rows, group by group, 16 of them side by side in a register.
#pragma once

#include "cpu/quantized/strips.h"

#if QUIRE_WIDE == 64

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int kSides = 2, kPanelRows = 16 * kSides, kChains = 4, kPanelTokens = 6;

// A group of a panel's rows, 16 on each side. Of `codes`, four columns each.
template <bool kHalves>
struct alignas(64) PanelGroup {
  __m512i codes[kSides][8];
  __m512 scale[kSides], minimum[kSides];
};
template <>
struct alignas(64) PanelGroup<true> {
  __m512i codes[kSides][8];
  __m512 scale[kSides], minimum[kSides];
  __m512i factors[kSides][2];
  __m512i low[kSides];  // of both halves, 16 bits each
};

using SideRows = const uint8_t* const (&)[16];

// 16 bytes at `offset` of each of 16 rows: four bytes of all rows in each register.
inline __attribute__((always_inline)) void turn_quads(SideRows rows, int64_t offset, __m512i* to) {
  __m512i own[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    own[i] = _mm512_castsi128_si512(load16(rows[i] + offset));
    own[i] = _mm512_mask_broadcast_i32x4(own[i], 0x00f0, load16(rows[4 + i] + offset));
    own[i] = _mm512_mask_broadcast_i32x4(own[i], 0x0f00, load16(rows[8 + i] + offset));
    own[i] = _mm512_mask_broadcast_i32x4(own[i], 0xf000, load16(rows[12 + i] + offset));
  }
  const __m512i ab = _mm512_unpacklo_epi32(own[0], own[1]), ab2 = _mm512_unpackhi_epi32(own[0], own[1]);
  const __m512i cd = _mm512_unpacklo_epi32(own[2], own[3]), cd2 = _mm512_unpackhi_epi32(own[2], own[3]);
  to[0] = _mm512_unpacklo_epi64(ab, cd), to[1] = _mm512_unpackhi_epi64(ab, cd);
  to[2] = _mm512_unpacklo_epi64(ab2, cd2), to[3] = _mm512_unpackhi_epi64(ab2, cd2);
}

// Bits kAt .. of all bytes: as many as `mask` has.
template <int kAt>
inline __m512i bits_at(__m512i v, int mask) {
  return _mm512_and_si512(_mm512_srli_epi16(v, kAt), bytes(mask));
}

// Codes of 16 rows' blocks straight from memory, for the kinds that are common. to(group, i): columns 4 i of a group.
template <class Kind>
struct SideCodes {
  static constexpr bool kThere = false;
};

template <>
struct SideCodes<Q4_0> {
  static constexpr bool kThere = true;
  template <class To>
  static void take(SideRows rows, int, const To& to) {
    for (int g = 0; g < kStepGroups; ++g) {
      __m512i quads[4];
      turn_quads(rows, 18 * g + 2, quads);
      for (int i = 0; i < 4; ++i) to(g, i) = bits_at<0>(quads[i], 15), to(g, 4 + i) = bits_at<4>(quads[i], 15);
    }
  }
};

template <>
struct SideCodes<Q8_0> {
  static constexpr bool kThere = true;
  template <class To>
  static void take(SideRows rows, int, const To& to) {
    for (int g = 0; g < kStepGroups; ++g) {
      for (int half = 0; half < 2; ++half) {
        __m512i quads[4];
        turn_quads(rows, 34 * g + 2 + 16 * half, quads);
        for (int i = 0; i < 4; ++i) to(g, 4 * half + i) = _mm512_xor_si512(quads[i], bytes(128));
      }
    }
  }
};

template <>
struct SideCodes<Q4_K> {
  static constexpr bool kThere = true;
  template <class To>
  static void take(SideRows rows, int second, const To& to) {
    for (int part = 0; part < 4; ++part) {
      __m512i quads[4];
      turn_quads(rows, 16 + 64 * second + 16 * part, quads);
      const int g = part / 2 * 2, at = part % 2 * 4;
      for (int i = 0; i < 4; ++i)
        to(g, at + i) = bits_at<0>(quads[i], 15), to(g + 1, at + i) = bits_at<4>(quads[i], 15);
    }
  }
};

template <>
struct SideCodes<Q6_K> {
  static constexpr bool kThere = true;
  template <class To>
  static void take(SideRows rows, int second, const To& to) {
    for (int half = 0; half < 2; ++half) {
      __m512i low[2][4], high[4];
      turn_quads(rows, 64 * second + 16 * half, low[0]);
      turn_quads(rows, 64 * second + 16 * half + 32, low[1]);
      turn_quads(rows, 128 + 32 * second + 16 * half, high);
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * half + i;
        to(0, at) = _mm512_or_si512(bits_at<0>(low[0][i], 15), _mm512_slli_epi16(bits_at<0>(high[i], 3), 4));
        to(1, at) = _mm512_or_si512(bits_at<0>(low[1][i], 15), _mm512_slli_epi16(bits_at<2>(high[i], 3), 4));
        to(2, at) = _mm512_or_si512(bits_at<4>(low[0][i], 15), _mm512_slli_epi16(bits_at<4>(high[i], 3), 4));
        to(3, at) = _mm512_or_si512(bits_at<4>(low[1][i], 15), _mm512_slli_epi16(bits_at<6>(high[i], 3), 4));
      }
    }
  }
};

// From lanes 4 * row + group of four rows each to lanes of 16 rows, by group.
inline void rows_by_group(const __m512i* from, __m512i* to) {
  const __m512i a = by_turns(from[0]), b = by_turns(from[1]), c = by_turns(from[2]), d = by_turns(from[3]);
  const __m512i ab = _mm512_shuffle_i32x4(a, b, 0x44), ab2 = _mm512_shuffle_i32x4(a, b, 0xee);
  const __m512i cd = _mm512_shuffle_i32x4(c, d, 0x44), cd2 = _mm512_shuffle_i32x4(c, d, 0xee);
  to[0] = _mm512_shuffle_i32x4(ab, cd, 0x88), to[1] = _mm512_shuffle_i32x4(ab, cd, 0xdd);
  to[2] = _mm512_shuffle_i32x4(ab2, cd2, 0x88), to[3] = _mm512_shuffle_i32x4(ab2, cd2, 0xdd);
}

// The first four lanes of four registers, one behind the other.
inline __m512i first_quads(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_inserti32x4(a, _mm512_castsi512_si128(b), 1);
  const __m512i cd = _mm512_inserti32x4(c, _mm512_castsi512_si128(d), 1);
  return _mm512_inserti64x4(ab, _mm512_castsi512_si256(cd), 1);
}

template <bool kOwnHalves, bool kOwnMinimum>
struct PanelForm {
  static constexpr bool kHalves = kOwnHalves, kMinimum = kOwnMinimum;
};

// Four columns kFirst .. of a group's eight times those of some tokens.
template <class Form, int kFirst, int kQuads, int kCount>
inline __attribute__((always_inline)) void add_quads(const __m512i (*codes)[8], const int* x, __m512i (*sums)[kSides]) {
#pragma GCC unroll 16
  for (int q = kFirst; q < kFirst + kQuads; ++q) {
    const __m512i own[] = {codes[0][q], codes[1][q]};
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      const __m512i four = _mm512_set1_epi32(x[kPanelTokens * q + i]);
      sums[i][0] = _mm512_dpbusd_epi32(sums[i][0], own[0], four);
      sums[i][1] = _mm512_dpbusd_epi32(sums[i][1], own[1], four);
    }
  }
}

// Number `at` of a panel's rows, sixteen at a time.
template <class Sides>
inline Vec sixteen(const Sides& sides, int64_t at) {
  return {sides(static_cast<int>(at))};
}

// A panel, [kChains][steps].
template <class Kind>
class Panel {
 public:
  using Group = PanelGroup<Kind::kHalves>;
  using Form = PanelForm<Kind::kHalves, Kind::kMinimum>;

  Panel(Group* groups, int64_t steps) : groups_(groups), steps_(steps) {}

  const Group* chain(int64_t number) const { return groups_ + number * steps_; }

  // Rows first .. first + count, or as many as a panel has; past the last, the last again.
  void take(const uint8_t* first, int64_t row_bytes, int64_t count, int64_t features) const {
    for (int side = 0; side < kSides; ++side) {
      const uint8_t* rows[16];
      for (int r = 0; r < 16; ++r) {
        const int64_t row = 16 * side + r;
        rows[r] = first + (row < count ? row : count - 1) * row_bytes;
      }
      take_side(rows, features, side);
    }
  }

 private:
  static constexpr int kParts = 16 / kStepRows;
  using Reader = StepReader<Kind>;
  using Parts = Step<Kind::kHalves>[kParts];

  void take_side(SideRows rows, int64_t features, int side) const {
    const StepRows own[] = {StepRows(rows), StepRows(rows + 4), StepRows(rows + 8), StepRows(rows + 12)};
    const Reader readers[] = {{own[0], features}, {own[1], features}, {own[2], features}, {own[3], features}};
    int64_t number = 0;
    if constexpr (SideCodes<Kind>::kThere)
      for (; number < features / kStep; ++number) take_straight(rows, number, side);
    for (; number < steps_; ++number) {
      Parts parts;
      for (int p = 0; p < kParts; ++p) readers[p].take(number, parts + p);
      put_codes(parts, groups_ + number, side);
      put_scales(parts, groups_ + number, side);
    }
  }

  // What is not looked at of `parts` is not worked out.
  __attribute__((flatten)) void take_straight(SideRows rows, int64_t number, int side) const {
    const int64_t offset = Reader::kLarge ? number / 2 * Kind::kBytes : number * Reader::kStepBytes;
    const int second = static_cast<int>(number % 2);
    const uint8_t* at[16];
    for (int r = 0; r < 16; ++r) at[r] = rows[r] + offset;
    Group* to = groups_ + number;
    SideCodes<Kind>::take(at, second, [&](int g, int i) -> __m512i& { return to[g * steps_].codes[side][i]; });
    Parts parts;
    for (int p = 0; p < kParts; ++p) {
      const uint8_t* const own[] = {at[4 * p], at[4 * p + 1], at[4 * p + 2], at[4 * p + 3]};
      Steps<Kind>::take(own, second, parts + p);
    }
    put_scales(parts, to, side);
  }

  void put_codes(const Parts& parts, Group* to, int side) const {
    const uint8_t* rows[16];
    for (int r = 0; r < 16; ++r) rows[r] = reinterpret_cast<const uint8_t*>(parts[r / kStepRows].codes[r % kStepRows]);
    // Quad i of a row's two registers: four columns of each group.
    for (int i = 0; i < 8; ++i) {
      __m512i turned[kStepGroups];
      turn_quads(rows, 16 * i, turned);
      for (int g = 0; g < kStepGroups; ++g) to[g * steps_].codes[side][i] = turned[g];
    }
  }

  void put_scales(const Parts& parts, Group* to, int side) const {
    spread(
        to, [&](int p) { return _mm512_castps_si512(parts[p].scale); },
        [&](Group& group, __m512i all) { group.scale[side] = _mm512_castsi512_ps(all); });
    if constexpr (Kind::kMinimum)
      spread(
          to, [&](int p) { return _mm512_castps_si512(parts[p].minimum); },
          [&](Group& group, __m512i all) { group.minimum[side] = _mm512_castsi512_ps(all); });
    if constexpr (Kind::kHalves) {
      for (int half = 0; half < 2; ++half) {
        const auto factors = [&](int p) {
          const auto& own = parts[p].factors;
          return first_quads(own[0][half], own[1][half], own[2][half], own[3][half]);
        };
        spread(to, factors, [&](Group& group, __m512i all) { group.factors[side][half] = all; });
      }
      const auto low = [&](int p) { return _mm512_or_si512(parts[p].low[0], _mm512_slli_epi32(parts[p].low[1], 16)); };
      if constexpr (Kind::kMinimum) spread(to, low, [&](Group& group, __m512i all) { group.low[side] = all; });
    }
  }

  template <class Get, class Set>
  void spread(Group* to, const Get& get, const Set& set) const {
    __m512i from[kParts], turned[kStepGroups];
    for (int p = 0; p < kParts; ++p) from[p] = get(p);
    rows_by_group(from, turned);
    for (int g = 0; g < kStepGroups; ++g) set(to[g * steps_], turned[g]);
  }

  Group* const groups_;
  const int64_t steps_;
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

#endif
