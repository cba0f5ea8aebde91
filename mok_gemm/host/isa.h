// Instruction sets the host tile workers are compiled for, and the run-time choice between them.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "mok_core/status.h"

namespace mok {

// Ordered from the least to the most capable. The values are part of the C API.
enum class Isa : int32_t {
  kPortable = 0,    // 128-bit compiler vectors, separate multiply and add; every architecture.
  kAvx2 = 1,        // x86-64 AVX2 + FMA.
  kAvx512 = 2,      // AVX-512 F, BW, VL, DQ; bf16 operands are widened to fp32 and fused.
  kAvx512Bf16 = 3,  // kAvx512 + BF16: bf16 operands go through the pair dot product VDPBF16PS.
};

// The lower-case name: "portable", "avx2", "avx512", "avx512_bf16".
const char* IsaName(Isa isa);

// The inverse of IsaName. kInvalidArgument names the text and lists the valid names.
StatusOr<Isa> ParseIsa(std::string_view name);

// True when this build holds the code of `isa` and processor and operating system can run it.
bool IsaSupported(Isa isa);

// The most capable supported ISA. Constant during a process.
Isa BestIsa();

// Every supported ISA in ascending order; kPortable is always the first.
std::vector<Isa> SupportedIsas();

}  // namespace mok
