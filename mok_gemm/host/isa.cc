#include "mok_gemm/host/isa.h"

#include <string>

#include "mok_gemm/host/kernels.h"

namespace mok {
namespace {

constexpr Isa kAllIsas[] = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16};

}  // namespace

const char* IsaName(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return "portable";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Bf16:
      return "avx512_bf16";
  }
  return "unknown";
}

StatusOr<Isa> ParseIsa(std::string_view name) {
  std::string valid;
  for (const Isa isa : kAllIsas) {
    if (name == IsaName(isa)) return isa;
    valid += StrCat(valid.empty() ? "" : ", ", IsaName(isa));
  }
  return InvalidArgumentError("ISA: expected one of ", valid, "; got \"", name, "\"");
}

// __builtin_cpu_supports also checks that the operating system saves the wide registers.
bool IsaSupported(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::kPortable:
      return true;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Isa::kAvx512:
      return IsaSupported(Isa::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512dq");
    case Isa::kAvx512Bf16:
      return IsaSupported(Isa::kAvx512) && __builtin_cpu_supports("avx512bf16");
  }
  return false;
#else
  return isa == Isa::kPortable;
#endif
}

Isa BestIsa() { return SupportedIsas().back(); }

std::vector<Isa> SupportedIsas() {
  std::vector<Isa> isas;
  for (const Isa isa : kAllIsas) {
    if (IsaSupported(isa)) isas.push_back(isa);
  }
  return isas;
}

const KernelTable& KernelsOf(Isa isa, DType dtype) {
  MOK_CHECK(IsaSupported(isa)) << "this machine cannot run " << IsaName(isa);
  MOK_CHECK(dtype == DType::kBf16 || dtype == DType::kFp32) << "dtype " << DTypeName(dtype);
#if defined(__x86_64__)
  switch (isa) {
    case Isa::kPortable:
      break;
    case Isa::kAvx2:
      return Avx2Kernels(dtype);
    case Isa::kAvx512:
      return Avx512Kernels(dtype);
    case Isa::kAvx512Bf16:
      return Avx512Bf16Kernels(dtype);
  }
#endif
  return PortableKernels(dtype);
}

}  // namespace mok
