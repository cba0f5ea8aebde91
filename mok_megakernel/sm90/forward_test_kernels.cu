#include "mok_megakernel/sm90/forward_test_kernels.h"

#include "mok_megakernel/sm90/forward_test_config.h"

namespace mok::testing {
namespace {

template <ColumnOrder kOrder>
ForwardKernelInfo KernelInfo() {
  using Config = Sm90ForwardConfig<SmallGemm<kOrder>>;
  return SmallKernelInfo<Config>(reinterpret_cast<const void*>(&ForwardKernel<Config>));
}

}  // namespace

ForwardKernelInfo SmallForwardKernel(ColumnOrder order) {
  return order == ColumnOrder::kPermuted ? KernelInfo<ColumnOrder::kPermuted>()
                                         : KernelInfo<ColumnOrder::kNatural>();
}

}  // namespace mok::testing
