// Rows of GGML's blocks, MXFP4 and int8, group by group of 32 columns, as whole numbers and the scales of them.
//
// A kind's struct says how many columns and bytes a block has, and takes a group of one apart:
//   codes      32 whole numbers, within int8
//   factors    of each half's 16 codes, where halves have factors of their own (kHalves); else 1
//   scale      of all: a weight is codes * factors * scale + offset
//   minimum    where kMinimum: the offset is minimum; with kHalves, low[half] * minimum
#pragma once

#include "cpu/quantized/numbers.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int kGroup = 32;

struct Group32 {
  int8_t codes[kGroup];
  int factors[2], low[2];
  float scale, minimum;
};

// 16 bytes: the low halves are the first 16 codes, the high ones the others; above them a bit each of `high`.
inline void nibbles(const uint8_t* bytes, uint32_t high, int offset, int8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = static_cast<int8_t>((bytes[i] & 15) + (high >> i & 1) * 16 - offset);
    codes[i + 16] = static_cast<int8_t>((bytes[i] >> 4) + (high >> (i + 16) & 1) * 16 - offset);
  }
}

struct Q4_0 {
  static constexpr int kColumns = 32, kBytes = 18;
  static constexpr bool kHalves = false, kMinimum = false;
  static void take(const uint8_t* block, int, Group32* to) {
    to->scale = half_at(block);
    nibbles(block + 2, 0, 8, to->codes);
  }
};

struct Q4_1 {
  static constexpr int kColumns = 32, kBytes = 20;
  static constexpr bool kHalves = false, kMinimum = true;
  static void take(const uint8_t* block, int, Group32* to) {
    to->scale = half_at(block), to->minimum = half_at(block + 2);
    nibbles(block + 4, 0, 0, to->codes);
  }
};

struct Q5_0 {
  static constexpr int kColumns = 32, kBytes = 22;
  static constexpr bool kHalves = false, kMinimum = false;
  static void take(const uint8_t* block, int, Group32* to) {
    to->scale = half_at(block);
    nibbles(block + 6, read<uint32_t>(block + 2), 16, to->codes);
  }
};

struct Q5_1 {
  static constexpr int kColumns = 32, kBytes = 24;
  static constexpr bool kHalves = false, kMinimum = true;
  static void take(const uint8_t* block, int, Group32* to) {
    to->scale = half_at(block), to->minimum = half_at(block + 2);
    nibbles(block + 8, read<uint32_t>(block + 4), 0, to->codes);
  }
};

struct Q8_0 {
  static constexpr int kColumns = 32, kBytes = 34;
  static constexpr bool kHalves = false, kMinimum = false;
  static void take(const uint8_t* block, int, Group32* to) {
    to->scale = half_at(block);
    __builtin_memcpy(to->codes, block + 2, kGroup);
  }
};

struct MxFp4 {
  static constexpr int kColumns = 32, kBytes = 17;
  static constexpr bool kHalves = false, kMinimum = false;
  static void take(const uint8_t* block, int, Group32* to) {
    to->scale = half_e8m0(block[0]);
    for (int i = 0; i < 16; ++i) {
      to->codes[i] = static_cast<int8_t>(twice_e2m1(block[1 + i] & 15));
      to->codes[i + 16] = static_cast<int8_t>(twice_e2m1(block[1 + i] >> 4));
    }
  }
};

// 256 columns; a scale and a minimum of 6 bits each for every 32, in 12 bytes.
struct SuperBlock {
  static void scale_and_minimum(const uint8_t* packed, int group, int* scale, int* minimum) {
    if (group < 4) {
      *scale = packed[group] & 63, *minimum = packed[group + 4] & 63;
      return;
    }
    *scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6 << 4);
    *minimum = (packed[group + 4] >> 4) | (packed[group] >> 6 << 4);
  }
  static void take_scales(const uint8_t* block, int group, Group32* to) {
    int scale, minimum;
    scale_and_minimum(block + 4, group, &scale, &minimum);
    to->scale = half_at(block) * static_cast<float>(scale);
    to->minimum = -(half_at(block + 2) * static_cast<float>(minimum));
  }
};

struct Q4_K : SuperBlock {
  static constexpr int kColumns = 256, kBytes = 144;
  static constexpr bool kHalves = false, kMinimum = true;
  static void take(const uint8_t* block, int group, Group32* to) {
    take_scales(block, group, to);
    const uint8_t* bytes = block + 16 + group / 2 * 32;
    for (int i = 0; i < kGroup; ++i) to->codes[i] = static_cast<int8_t>(bytes[i] >> group % 2 * 4 & 15);
  }
};

struct Q5_K : SuperBlock {
  static constexpr int kColumns = 256, kBytes = 176;
  static constexpr bool kHalves = false, kMinimum = true;
  static void take(const uint8_t* block, int group, Group32* to) {
    take_scales(block, group, to);
    const uint8_t *high = block + 16, *bytes = block + 48 + group / 2 * 32;
    for (int i = 0; i < kGroup; ++i)
      to->codes[i] = static_cast<int8_t>((bytes[i] >> group % 2 * 4 & 15) | (high[i] >> group & 1) << 4);
  }
};

struct Q6_K {
  static constexpr int kColumns = 256, kBytes = 210;
  static constexpr bool kHalves = true, kMinimum = false;
  static void take(const uint8_t* block, int group, Group32* to) {
    const uint8_t *low = block + group / 4 * 64 + group % 2 * 32, *high = block + 128 + group / 4 * 32;
    const int8_t* scales = reinterpret_cast<const int8_t*>(block + 192) + 2 * group;
    to->scale = half_at(block + 208);
    to->factors[0] = scales[0], to->factors[1] = scales[1];
    for (int i = 0; i < kGroup; ++i) {
      const int four = low[i] >> group % 4 / 2 * 4 & 15, two = high[i] >> group % 4 * 2 & 3;
      to->codes[i] = static_cast<int8_t>((four | two << 4) - 32);
    }
  }
};

struct Q2_K {
  static constexpr int kColumns = 256, kBytes = 84;
  static constexpr bool kHalves = true, kMinimum = true;
  static void take(const uint8_t* block, int group, Group32* to) {
    const uint8_t *scales = block + 2 * group, *bytes = block + 16 + group / 4 * 32;
    to->scale = half_at(block + 80), to->minimum = -half_at(block + 82);
    for (int half = 0; half < 2; ++half) to->factors[half] = scales[half] & 15, to->low[half] = scales[half] >> 4;
    for (int i = 0; i < kGroup; ++i) to->codes[i] = static_cast<int8_t>(bytes[i] >> group % 4 * 2 & 3);
  }
};

struct Q3_K {
  static constexpr int kColumns = 256, kBytes = 110;
  static constexpr bool kHalves = true, kMinimum = false;
  static void take(const uint8_t* block, int group, Group32* to) {
    const uint8_t *high = block, *bytes = block + 32 + group / 4 * 32, *scales = block + 96;
    to->scale = half_at(block + 108);
    for (int half = 0; half < 2; ++half) {
      const int i = 2 * group + half;
      to->factors[half] = ((scales[i % 8] >> i / 8 * 4 & 15) | (scales[8 + i % 4] >> i / 4 * 2 & 3) << 4) - 32;
    }
    for (int i = 0; i < kGroup; ++i)
      to->codes[i] = static_cast<int8_t>((bytes[i] >> group % 4 * 2 & 3) - (high[i] >> group & 1 ? 0 : 4));
  }
};

// Of weights whose rows are bytes.
inline int64_t mean_row_bytes(const LinearArgs& args) {
  int64_t bytes = 0, rows = 0;
  for (int64_t i = 0; i < args.count; ++i)
    bytes += args.weights[i].rows * args.formats[i].row_bytes, rows += args.weights[i].rows;
  return rows > 0 ? bytes / rows : 0;
}

// body(Kind{}) for a kind whose rows are groups.
template <class Body>
inline void for_kind(RowKind kind, const Body& body) {
  switch (kind) {
    case RowKind::q4_0: return body(Q4_0{});
    case RowKind::q4_1: return body(Q4_1{});
    case RowKind::q5_0: return body(Q5_0{});
    case RowKind::q5_1: return body(Q5_1{});
    case RowKind::q8_0: return body(Q8_0{});
    case RowKind::q2_k: return body(Q2_K{});
    case RowKind::q3_k: return body(Q3_K{});
    case RowKind::q4_k: return body(Q4_K{});
    case RowKind::q5_k: return body(Q5_K{});
    case RowKind::q6_k: return body(Q6_K{});
    case RowKind::mxfp4: return body(MxFp4{});
    default: return;  // no groups
  }
}

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire
