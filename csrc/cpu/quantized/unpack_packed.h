// Rows of codes behind their scales (affine and table kinds), of int8, and of 16 or 32 bits, as elements of T: the
// float32 value, rounded once.
#pragma once

#include "cpu/quantized/codes.h"
#include "cpu/quantized/numbers.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

template <class Stored>
struct UnpackElements {
  template <class T>
  static void row(const uint8_t* bytes, int64_t features, T* to) {
    const Stored* from = reinterpret_cast<const Stored*>(bytes);
    for (int64_t k = 0; k < features; k += kLanes) {
      const int n = static_cast<int>(features - k < kLanes ? features - k : kLanes);
      store_first(to + k, load_first(from + k, n), n);
    }
  }
};

// What is left of a row behind its last sixteen columns, as if it were sixteen.
struct Tail {
  uint8_t codes[kLanes] = {};
  int32_t places[kLanes] = {};
};

// Rows lie one behind the other: so far ahead, what comes is fetched, of this row or of the next ones.
constexpr int64_t kAheadBytes = 4 << 10;

// Thirty-two columns at a time, then sixteen, then those that are left. numbers: of codes, the floats. kBits: of a code.
template <int kBits, class T, class Numbers>
inline __attribute__((always_inline)) void unpack_run(const uint8_t* codes, int64_t columns, T* to,
                                                      const Numbers& numbers) {
  int64_t k = 0;
  for (; k + 2 * kLanes <= columns; k += 2 * kLanes, codes += 2 * kLanes * kBits / 8) {
    __builtin_prefetch(codes + kAheadBytes, 0, 3);
    store32(to + k, numbers(codes), numbers(codes + kLanes * kBits / 8));
  }
  if (k + kLanes <= columns) {
    store(to + k, numbers(codes));
    k += kLanes, codes += kLanes * kBits / 8;
  }
  if (k >= columns) return;
  Tail tail;
  __builtin_memcpy(tail.codes, codes, (columns - k) * kBits / 8);
  store_first(to + k, numbers(tail.codes), static_cast<int>(columns - k));
}

struct UnpackInt8 {
  template <class T>
  static void row(const uint8_t* bytes, int64_t features, T* to) {
    const Vec scale = set1(read<float>(bytes)), offset = set1(128);
    // Of int8, as bytes, the sign is what 128 is of the others.
    unpack_run<8>(bytes + sizeof(float), features, to, [&](const uint8_t* codes) {
      uint8_t moved[kLanes];
      for (int i = 0; i < kLanes; ++i) moved[i] = codes[i] ^ 128;
      return mul(sub(bytes16(moved), offset), scale);
    });
  }
};

// Where a row's parts lie.
template <int kBits>
struct PackedRow {
  const uint8_t *scales, *zeros, *codes;
  int64_t group;

  PackedRow(const RowFormat& format, const uint8_t* row, int64_t features)
      : scales(row), zeros(nullptr), codes(row), group(format.group > 0 ? format.group : features) {
    const int64_t bytes = (features + group - 1) / group * static_cast<int64_t>(sizeof(float));
    codes += bytes;
    if (format.zeros) zeros = codes, codes += bytes;
  }

  // Of columns first .. end, those of one group at a time: body(group, its first column here, how many).
  template <class Body>
  inline __attribute__((always_inline)) void each_group(int64_t first, int64_t end, const Body& body) const {
    if (group >= end) return body(0, first, end - first);
    for (int64_t k = first, g = first / group; k < end; ++g) {
      const int64_t stop = (g + 1) * group < end ? (g + 1) * group : end;
      body(g, k, stop - k);
      k = stop;
    }
  }
  float scale(int64_t g) const { return read<float>(scales + 4 * g); }
  float zero(int64_t g) const { return zeros ? read<float>(zeros + 4 * g) : static_cast<float>(1 << (kBits - 1)); }
  int code(int64_t k) const { return kBits == 8 ? codes[k] : codes[k / 2] >> k % 2 * 4 & 15; }
  // Whether every group begins with a whole byte.
  bool is_even(int64_t features) const { return kBits == 8 || group % 2 == 0 || group >= features; }
};

#if defined(__AVX512BW__)

// Columns of one group of four-bit codes as elements of 16 bits, 32 at a time; numbers: what the sixteen codes stand for.
// Of a pair's two words, the first is looked up by five bits, of which the fifth is the other code's; the table is there
// twice.
template <class Half>
inline void unpack_halves(Vec numbers, const uint8_t* codes, int64_t columns, Half* to) {
  const __m512i table = _mm512_broadcast_i64x4(narrow(numbers, Half{}));
  for (int64_t k = 0; k < columns; k += 32, codes += 16) {
    __builtin_prefetch(codes + kAheadBytes, 0, 3);
    const __m512i pairs = _mm512_cvtepu8_epi32(load_codes(codes));
    const __m512i words = _mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12));
    _mm512_storeu_si512(to + k, _mm512_permutexvar_epi16(words, table));
  }
}
template <class T>
constexpr bool kUnpacksHalves = sizeof(T) == 2;

#else

template <class Half>
inline void unpack_halves(Vec, const uint8_t*, int64_t, Half*) {}
template <class T>
constexpr bool kUnpacksHalves = false;

#endif

// Columns first .. end of four-bit codes, each of which stands for one of sixteen numbers; to: of column `first`.
// numbers_of: those of a group.
template <class T, class NumbersOf>
inline __attribute__((always_inline)) void unpack_nibbles(const PackedRow<4>& row, int64_t first, int64_t end, T* to,
                                                          const NumbersOf& numbers_of) {
  row.each_group(first, end, [&](int64_t g, int64_t k, int64_t columns) {
    const Vec numbers = numbers_of(g);
    int64_t done = 0;
    if constexpr (kUnpacksHalves<T>) {
      done = columns / 32 * 32;
      unpack_halves(numbers, row.codes + k / 2, done, to + k - first);
      if (done == columns) return;
    }
    unpack_run<4>(row.codes + (k + done) / 2, columns - done, to + k - first + done,
                  [&](const uint8_t* codes) { return lookup16(numbers, codes); });
  });
}

template <int kBits>
struct UnpackAffine {
  // Columns first .. end of a row; first: an even one.
  template <class T>
  static void columns(const RowFormat& format, const uint8_t* bytes, int64_t features, int64_t first, int64_t end,
                      T* to) {
    const PackedRow<kBits> row(format, bytes, features);
    if (format.aux) return by_groups(row, static_cast<const int32_t*>(format.aux), first, end, to);
    if (!row.is_even(features)) return one_by_one(row, first, end, to);
    if constexpr (kBits == 4) {
      constexpr float kCodes[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      const Vec codes = load(kCodes);
      unpack_nibbles(row, first, end, to,
                     [&](int64_t g) { return mul(sub(codes, set1(row.zero(g))), set1(row.scale(g))); });
    } else {
      row.each_group(first, end, [&](int64_t g, int64_t k, int64_t count) {
        const Vec scale = set1(row.scale(g)), zero = set1(row.zero(g));
        unpack_run<8>(row.codes + k, count, to + k - first,
                      [&](const uint8_t* codes) { return mul(sub(bytes16(codes), zero), scale); });
      });
    }
  }

 private:
  // groups: of each column.
  template <class T>
  static void by_groups(const PackedRow<kBits>& row, const int32_t* groups, int64_t first, int64_t end, T* to) {
    const Vec middle = set1(static_cast<float>(1 << (kBits - 1)));
    for (int64_t k = first; k < end; k += kLanes) {
      const int n = static_cast<int>(end - k < kLanes ? end - k : kLanes);
      const uint8_t* codes = row.codes + k * kBits / 8;
      const int32_t* places = groups + k;
      Tail tail;
      if (n < kLanes) {
        __builtin_memcpy(tail.codes, codes, n * kBits / 8);
        __builtin_memcpy(tail.places, places, n * sizeof(int32_t));
        codes = tail.codes, places = tail.places;
      }
      const Vec numbers = kBits == 8 ? bytes16(codes) : nibbles16(codes);
      const Vec zero = row.zeros ? gather16(row.zeros, places) : middle;
      store_first(to + k - first, mul(sub(numbers, zero), gather16(row.scales, places)), n);
    }
  }
  template <class T>
  static void one_by_one(const PackedRow<kBits>& row, int64_t first, int64_t end, T* to) {
    for (int64_t k = first; k < end; ++k) {
      const float code = static_cast<float>(row.code(k));
      store_first(to + k - first, set1((code - row.zero(k / row.group)) * row.scale(k / row.group)), 1);
    }
  }
};

template <int kBits>
struct UnpackTable {
  template <class T>
  static void columns(const RowFormat& format, const uint8_t* bytes, int64_t features, int64_t first, int64_t end,
                      T* to) {
    const PackedRow<kBits> row(format, bytes, features);
    const float* table = static_cast<const float*>(format.aux);
    if constexpr (kBits == 4) {
      if (row.is_even(features)) {
        const Vec all = load(table);
        return unpack_nibbles(row, first, end, to, [&](int64_t g) { return mul(all, set1(row.scale(g))); });
      }
    }
    for (int64_t k = first; k < end; ++k)
      store_first(to + k - first, set1(table[row.code(k)] * row.scale(k / row.group)), 1);
  }
};

// Whether a table is that of 8-bit floats, which are had faster than from a table. NaN stands at 127 and 255.
inline bool is_small_floats(const float* table) {
  for (int first = 0; first < 256; first += kLanes) {
    uint8_t codes[kLanes];
    uint32_t numbers[kLanes], own[kLanes];
    for (int i = 0; i < kLanes; ++i) codes[i] = static_cast<uint8_t>(first + i);
    store(reinterpret_cast<float*>(numbers), small_floats16(codes));
    __builtin_memcpy(own, table + first, sizeof own);
    for (int i = 0; i < kLanes; ++i) {
      const bool nan = (own[i] & 0x7fffffff) > 0x7f800000;
      if ((first + i) % 128 == 127 ? !nan : numbers[i] != own[i]) return false;
    }
  }
  return true;
}

struct UnpackSmallFloats {
  template <class T>
  static void columns(const RowFormat& format, const uint8_t* bytes, int64_t features, int64_t first, int64_t end,
                      T* to) {
    const PackedRow<8> row(format, bytes, features);
    if (has_nan(row.codes + first, end - first))
      return UnpackTable<8>::columns(format, bytes, features, first, end, to);
    row.each_group(first, end, [&](int64_t g, int64_t k, int64_t count) {
      const Vec scale = set1(row.scale(g));
      unpack_run<8>(row.codes + k, count, to + k - first,
                    [&](const uint8_t* codes) { return mul(small_floats16(codes), scale); });
    });
  }

 private:
  static bool has_nan(const uint8_t* codes, int64_t count) {
    int found = 0;
    for (int64_t k = 0; k < count; ++k) found |= (codes[k] & 127) == 127;
    return found != 0;
  }
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire
