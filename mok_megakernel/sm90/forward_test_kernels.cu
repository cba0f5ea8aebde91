#include "mok_megakernel/sm90/forward_test_kernels.h"

#include "mok_megakernel/sm90/forward_test_config.h"

namespace mok::testing {

ForwardKernelInfo SmallForwardKernel(ColumnOrder order) {
  return KernelInfoOfOrder(order, [](auto constant) {
    using Config = Sm90ForwardConfig<SmallGemm<constant()>>;
    return KernelInfoOf<Config>(reinterpret_cast<const void*>(&ForwardKernel<Config>));
  });
}

ForwardKernelInfo SmallTracedForwardKernel(ColumnOrder order) {
  return KernelInfoOfOrder(order, [](auto constant) {
    using Config = TracedForwardConfig<SmallGemm<constant()>>;
    return KernelInfoOf<Config>(reinterpret_cast<const void*>(&ForwardKernel<Config>));
  });
}

}  // namespace mok::testing
