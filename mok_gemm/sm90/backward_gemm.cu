#include "mok_gemm/sm90/backward_gemm_kernel.h"

namespace mok::testing {

BackwardGemmKernelInfo BackwardGemmKernel() {
  return backward_gemm_internal::KernelInfo<DefaultSm90GemmConfig<ColumnOrder::kNatural>>();
}

}  // namespace mok::testing
