#include "mok_gemm/host/simd_avx2.h"
//
#include "mok_gemm/host/kernel_set.h"

namespace mok {

const KernelTable& Avx2Kernels(DType dtype) { return KernelsFor<Simd>(dtype); }

}  // namespace mok
