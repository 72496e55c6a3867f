// Which processor this is, where instruction sets do not tell: for what was measured of some, never for what is computed.
#pragma once

namespace quire {
namespace QUIRE_ISA {
namespace {

inline bool is_amd() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

// Family 26 and what comes after it.
inline bool is_amd_since_zen5() {
#if defined(__x86_64__)
  return is_amd() && !__builtin_cpu_is("amdfam15h") && !__builtin_cpu_is("amdfam17h") && !__builtin_cpu_is("amdfam19h");
#else
  return false;
#endif
}

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire
