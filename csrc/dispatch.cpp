#include <string_view>

#include "isa.h"

#ifdef EDGEXPERT_AVX2
#include <cpuid.h>
#endif
#if defined(EDGEXPERT_NEON) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace edgexpert {
namespace {

#ifdef EDGEXPERT_AVX2
bool has_f16c() {  // clang's __builtin_cpu_supports does not know it
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

#ifdef EDGEXPERT_NEON
bool has_dot_product() {
#ifdef __linux__
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  return true;  // macOS runs on no Arm processor without it
#endif
}
#endif

const Isa* find(std::string_view name) {
#ifdef EDGEXPERT_AVX512
#ifdef EDGEXPERT_EMULATE_AVX512
  if (name == "avx512") return &isa_avx512;
#else
  if ((name == "avx512" || name == "auto") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
    return &isa_avx512;
#endif
#endif
#ifdef EDGEXPERT_AVX2
  if ((name == "avx2" || name == "auto") && __builtin_cpu_supports("avx2") && has_f16c()) return &isa_avx2;
#endif
#ifdef EDGEXPERT_NEON
  if ((name == "neon" || name == "auto") && has_dot_product()) return &isa_neon;
#endif
  if (name == "portable" || name == "auto") return &isa_portable;
  return nullptr;
}

const Isa*& current() {
  static const Isa* isa = find("auto");
  return isa;
}

}  // namespace

const Isa& isa() { return *current(); }

bool has_isa(const char* name) { return find(name) != nullptr; }

bool select_isa(const char* name) {
  const Isa* found = find(name);
  if (found) current() = found;
  return found != nullptr;
}

}  // namespace edgexpert
