#include "mok_gemm/host/simd_portable.h"
//
#include "mok_gemm/host/kernel_set.h"

namespace mok {

const KernelTable& PortableKernels(DType dtype) { return KernelsFor<Simd>(dtype); }

}  // namespace mok
