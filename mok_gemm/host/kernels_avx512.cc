#include "mok_gemm/host/simd_avx512.h"
//
#include "mok_gemm/host/kernel_set.h"

namespace mok {

const KernelTable& Avx512Kernels(DType dtype) { return KernelsFor<Simd>(dtype); }

}  // namespace mok
