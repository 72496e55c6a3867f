// What one thread takes at a time of a linear kernel's work: some rows of a weight, for some tokens.
#pragma once

#include "cpu/common/kernels.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

// Fetching a weight from memory takes as long as so many multiplications with it.
constexpr int64_t kFetchWork = 8;

// Stored: what weights lie in memory as.
template <class T, class Out, class Stored = T>
struct LinearBlock {
  const Stored* w;  // the first row's features, rows one after the other
  const T* bias;    // of the first row, or null
  Out* y;           // the call's first token, the block's first row
  int64_t y_stride, rows;
  int64_t part, first, tokens;  // which of the call's tokens
  int64_t weight;               // its number
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire
