#include "mok_megakernel/sm90/backward_test_kernels.h"

#include "mok_megakernel/sm90/backward_test_config.h"

namespace mok::testing {
namespace {

template <class Config>
PassKernelInfo KernelInfo() {
  return KernelInfoOf<Config>(reinterpret_cast<const void*>(&BackwardKernel<Config>));
}

}  // namespace

PassKernelInfo SmallBackwardKernel(ColumnOrder order) {
  return order == ColumnOrder::kPermuted
             ? KernelInfo<Sm90BackwardConfig<SmallBackwardGemm<ColumnOrder::kPermuted>>>()
             : KernelInfo<Sm90BackwardConfig<SmallBackwardGemm<ColumnOrder::kNatural>>>();
}

PassKernelInfo SmallTracedBackwardKernel(ColumnOrder order) {
  return order == ColumnOrder::kPermuted
             ? KernelInfo<TracedBackwardConfig<SmallBackwardGemm<ColumnOrder::kPermuted>>>()
             : KernelInfo<TracedBackwardConfig<SmallBackwardGemm<ColumnOrder::kNatural>>>();
}

}  // namespace mok::testing
