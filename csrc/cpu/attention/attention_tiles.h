// Rows of the cache as attention on AMX loads them.
#pragma once

#if defined(__AMX_BF16__)

#include "cpu/common/tiles.h"
#include "cpu/common/units.h"

namespace quire {
namespace QUIRE_ISA {

// int8 as bf16, in which they are exact.
inline __m512i load_features(const int8_t* p, int64_t count) {
  const Vec units = count >= kTileFeatures ? Units<bf16>::load(p) : Units<bf16>::load(p, static_cast<int>(count));
  return _mm512_castps_si512(units.v);
}

}  // namespace QUIRE_ISA
}  // namespace quire

#endif
