// The forward kernel that traces what its roles do.
#include "mok_megakernel/sm90/forward_kernel.h"
#include "mok_megakernel/sm90/forward_launch.h"
#include "mok_megakernel/sm90/pass_kernel_info.h"

namespace mok {
namespace {

template <ColumnOrder kOrder>
ForwardKernelInfo KernelInfo() {
  using Config = TracedForwardConfig<DefaultSm90GemmConfig<kOrder>>;
  return KernelInfoOf<Config>(reinterpret_cast<const void*>(&ForwardKernel<Config>));
}

}  // namespace

ForwardKernelInfo TracedForwardKernelOf(ColumnOrder order) {
  return order == ColumnOrder::kPermuted ? KernelInfo<ColumnOrder::kPermuted>()
                                         : KernelInfo<ColumnOrder::kNatural>();
}

}  // namespace mok
