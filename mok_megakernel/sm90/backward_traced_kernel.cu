// The backward kernel that traces what its roles do.
#include "mok_megakernel/sm90/backward_kernel.h"
#include "mok_megakernel/sm90/backward_launch.h"
#include "mok_megakernel/sm90/pass_kernel_info.h"

namespace mok {
namespace {

template <ColumnOrder kOrder>
PassKernelInfo KernelInfo() {
  using Config = TracedBackwardConfig<DefaultSm90GemmConfig<kOrder>>;
  return KernelInfoOf<Config>(reinterpret_cast<const void*>(&BackwardKernel<Config>));
}

}  // namespace

PassKernelInfo TracedBackwardKernelOf(ColumnOrder order) {
  return order == ColumnOrder::kPermuted ? KernelInfo<ColumnOrder::kPermuted>()
                                         : KernelInfo<ColumnOrder::kNatural>();
}

}  // namespace mok
