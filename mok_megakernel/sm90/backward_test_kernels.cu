#include "mok_megakernel/sm90/backward_test_kernels.h"

#include "mok_megakernel/sm90/backward_test_config.h"

namespace mok::testing {
namespace {

template <ColumnOrder kOrder>
PassKernelInfo KernelInfo() {
  using Config = Sm90BackwardConfig<SmallBackwardGemm<kOrder>>;
  return SmallBackwardKernelInfo<Config>(reinterpret_cast<const void*>(&BackwardKernel<Config>));
}

}  // namespace

PassKernelInfo SmallBackwardKernel(ColumnOrder order) {
  return order == ColumnOrder::kPermuted ? KernelInfo<ColumnOrder::kPermuted>()
                                         : KernelInfo<ColumnOrder::kNatural>();
}

}  // namespace mok::testing
