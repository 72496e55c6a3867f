#include "cpu/common/isa.h"

#if defined(QUIRE_HAS_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {

#ifdef QUIRE_HAS_AMX
namespace amx {
extern const Kernels kernels;
}
#endif
#ifdef QUIRE_HAS_AVX512
namespace avx512 {
extern const Kernels kernels;
}
#endif
#ifdef QUIRE_HAS_AVX512F
namespace avx512f {
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

namespace {

// __builtin_cpu_supports also asks whether the operating system saves the wide registers.
[[maybe_unused]] bool has_avx512f() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

// Every processor that has bf16 has the products of bytes, VNNI, too; it is asked for all the same.
[[maybe_unused]] bool has_avx512() {
  return has_avx512f() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

#ifdef QUIRE_HAS_AMX
// Linux saves a process's matrix registers once it has asked for that (arch_prctl(2); kernel 5.16 and newer).
bool has_amx() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
  return has_avx512() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

}  // namespace

const Isa* isas(int* count) {
  static const Isa table[] = {
#ifdef QUIRE_HAS_AMX
      {"amx", &amx::kernels, has_amx()},
#endif
#ifdef QUIRE_HAS_AVX512
      {"avx512", &avx512::kernels, has_avx512()},
#endif
#ifdef QUIRE_HAS_AVX512F
      {"avx512f", &avx512f::kernels, has_avx512f()},
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
