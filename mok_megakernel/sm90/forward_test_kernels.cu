#include "mok_megakernel/sm90/forward_test_kernels.h"

#include "mok_megakernel/sm90/forward_test_config.h"

namespace mok::testing {
namespace {

template <class Config>
ForwardKernelInfo KernelInfo() {
  return KernelInfoOf<Config>(reinterpret_cast<const void*>(&ForwardKernel<Config>));
}

}  // namespace

ForwardKernelInfo SmallForwardKernel(ColumnOrder order) {
  return order == ColumnOrder::kPermuted
             ? KernelInfo<Sm90ForwardConfig<SmallGemm<ColumnOrder::kPermuted>>>()
             : KernelInfo<Sm90ForwardConfig<SmallGemm<ColumnOrder::kNatural>>>();
}

ForwardKernelInfo SmallTracedForwardKernel(ColumnOrder order) {
  return order == ColumnOrder::kPermuted
             ? KernelInfo<TracedForwardConfig<SmallGemm<ColumnOrder::kPermuted>>>()
             : KernelInfo<TracedForwardConfig<SmallGemm<ColumnOrder::kNatural>>>();
}

}  // namespace mok::testing
