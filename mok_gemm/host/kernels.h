// The choice of a kernel table.
#pragma once

#include "mok_core/dtype.h"
#include "mok_gemm/host/isa.h"
#include "mok_gemm/host/kernel_table.h"

namespace mok {

// The kernels of `isa` for operands of `dtype`. A violation ends the process: `isa` must be
// supported, `dtype` kBf16 or kFp32.
const KernelTable& KernelsOf(Isa isa, DType dtype);

}  // namespace mok
