#include "mok_megakernel/sm90/backward_test_kernels.h"

#include "mok_megakernel/sm90/backward_test_config.h"

namespace mok::testing {

PassKernelInfo SmallBackwardKernel(ColumnOrder order) {
  return KernelInfoOfOrder(order, [](auto constant) {
    using Config = Sm90BackwardConfig<SmallBackwardGemm<constant()>>;
    return KernelInfoOf<Config>(reinterpret_cast<const void*>(&BackwardKernel<Config>));
  });
}

PassKernelInfo SmallTracedBackwardKernel(ColumnOrder order) {
  return KernelInfoOfOrder(order, [](auto constant) {
    using Config = TracedBackwardConfig<SmallBackwardGemm<constant()>>;
    return KernelInfoOf<Config>(reinterpret_cast<const void*>(&BackwardKernel<Config>));
  });
}

}  // namespace mok::testing
