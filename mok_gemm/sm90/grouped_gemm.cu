#include "mok_gemm/sm90/grouped_gemm_kernel.h"

namespace mok {
namespace {

template <ColumnOrder kOrder>
GroupedGemmKernelInfo KernelOfOrder(GemmEpilogue epilogue) {
  using Config = DefaultSm90GemmConfig<kOrder>;
  return epilogue == GemmEpilogue::kSwiGlu
             ? grouped_gemm_internal::KernelInfo<Config, GemmEpilogue::kSwiGlu>()
             : grouped_gemm_internal::KernelInfo<Config, GemmEpilogue::kStore>();
}

}  // namespace

GroupedGemmKernelInfo GroupedGemmKernel(ColumnOrder order, GemmEpilogue epilogue) {
  return order == ColumnOrder::kPermuted ? KernelOfOrder<ColumnOrder::kPermuted>(epilogue)
                                         : KernelOfOrder<ColumnOrder::kNatural>(epilogue);
}

}  // namespace mok
