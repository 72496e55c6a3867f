#include "cpu/common/isa.h"

#include "cpu/common/processor.h"

#if defined(QUIRE_HAS_AVXVNNI)
#include <cpuid.h>
#endif
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
void integer_linear(const LinearArgs&);
void integer_grouped_linear(const GroupedLinearArgs&);
}  // namespace avx512
#endif
#ifdef QUIRE_HAS_AVX512F
namespace avx512f {
extern const Kernels kernels;
void integer_linear(const LinearArgs&);
void integer_grouped_linear(const GroupedLinearArgs&);
}  // namespace avx512f
#endif
#ifdef QUIRE_HAS_AVX512VNNI
namespace avx512vnni {
void integer_linear(const LinearArgs&);
void integer_grouped_linear(const GroupedLinearArgs&);
}  // namespace avx512vnni
#endif
#ifdef QUIRE_HAS_AVXVNNI
namespace avxvnni {
void integer_linear(const LinearArgs&);
void integer_grouped_linear(const GroupedLinearArgs&);
}  // namespace avxvnni
#endif
#ifdef QUIRE_HAS_NARROWVNNI
namespace narrowvnni {
void integer_linear(const LinearArgs&);
void integer_grouped_linear(const GroupedLinearArgs&);
}  // namespace narrowvnni
#endif
#ifdef QUIRE_HAS_AVX2
namespace avx2 {
extern const Kernels kernels;
void integer_linear(const LinearArgs&);
void integer_grouped_linear(const GroupedLinearArgs&);
}  // namespace avx2
#endif
namespace portable {
extern const Kernels kernels;
void integer_linear(const LinearArgs&);
void integer_grouped_linear(const GroupedLinearArgs&);
}  // namespace portable

#if defined(__x86_64__)
namespace {

bool is_old_amd() {
  __builtin_cpu_init();
  return __builtin_cpu_is("amdfam15h") || __builtin_cpu_is("amdfam17h") || __builtin_cpu_is("amdfam19h");
}

}  // namespace

const bool kAmdBeforeZen5 = is_old_amd();
const bool kAmdSinceZen5 = !kAmdBeforeZen5 && __builtin_cpu_is("amd");
#endif

namespace {

// __builtin_cpu_supports also asks whether the operating system saves the wide registers.
[[maybe_unused]] bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

#ifdef QUIRE_HAS_AVXVNNI
// Bit 4 of EAX of leaf 7.1 (Intel SDM volume 2, CPUID), since compilers know it by different names.
bool has_avxvnni() {
  unsigned eax = 0, ebx, ecx, edx;
  return has_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
}
#endif

[[maybe_unused]] bool has_avx512f() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

// Products of bytes, which Intel's servers have had since Cascade Lake, the generation before bf16's.
[[maybe_unused]] bool has_avx512vnni() { return has_avx512f() && __builtin_cpu_supports("avx512vnni"); }

// Every processor that has bf16 has VNNI too; it is asked for all the same.
[[maybe_unused]] bool has_avx512() { return has_avx512vnni() && __builtin_cpu_supports("avx512bf16"); }

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
      {"amx", &amx::kernels, avx512::integer_linear, avx512::integer_grouped_linear, has_amx()},
#endif
#ifdef QUIRE_HAS_AVX512
      {"avx512", &avx512::kernels, avx512::integer_linear, avx512::integer_grouped_linear, has_avx512()},
#endif
#ifdef QUIRE_HAS_AVX512VNNI
      {"avx512vnni", &avx512f::kernels, avx512vnni::integer_linear, avx512vnni::integer_grouped_linear,
       has_avx512vnni()},
#endif
#ifdef QUIRE_HAS_AVX512F
      {"avx512f", &avx512f::kernels, avx512f::integer_linear, avx512f::integer_grouped_linear, has_avx512f()},
#endif
#ifdef QUIRE_HAS_AVXVNNI
      {"avxvnni", &avx2::kernels, avxvnni::integer_linear, avxvnni::integer_grouped_linear, has_avxvnni()},
#endif
#ifdef QUIRE_HAS_AVX2
      {"avx2", &avx2::kernels, avx2::integer_linear, avx2::integer_grouped_linear, has_avx2()},
#endif
      {"portable", &portable::kernels, portable::integer_linear, portable::integer_grouped_linear, true},
#ifdef QUIRE_HAS_NARROWVNNI  // of tests: avxvnni's products in AVX-512's encoding, for machines that have that alone
      {"narrowvnni", &avx512f::kernels, narrowvnni::integer_linear, narrowvnni::integer_grouped_linear,
       has_avx512vnni()},
#endif
  };
  *count = static_cast<int>(sizeof table / sizeof table[0]);
  return table;
}

}  // namespace quire
