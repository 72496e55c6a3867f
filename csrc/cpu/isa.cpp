#include "isa.h"

namespace quire {

#ifdef QUIRE_HAS_AVX512
namespace avx512 {
extern const Kernels kernels;
}
#endif
#ifdef QUIRE_HAS_AVX2
namespace avx2 {
extern const Kernels kernels;
}
#endif
namespace portable {
extern const Kernels kernels;
}

const Isa* isas(int* count) {
  // __builtin_cpu_supports also asks whether the operating system saves the wide registers.
  static const Isa table[] = {
#ifdef QUIRE_HAS_AVX512
      {"avx512", &avx512::kernels,
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("fma")},
#endif
#ifdef QUIRE_HAS_AVX2
      {"avx2", &avx2::kernels,
       __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")},
#endif
      {"portable", &portable::kernels, true},
  };
  *count = static_cast<int>(sizeof table / sizeof table[0]);
  return table;
}

}  // namespace quire
