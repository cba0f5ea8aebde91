// The backward kernel that traces what its roles do.
#include "mok_megakernel/sm90/backward_kernel.h"
#include "mok_megakernel/sm90/backward_launch.h"
#include "mok_megakernel/sm90/pass_kernel_info.h"

namespace mok {

PassKernelInfo TracedBackwardKernelOf(ColumnOrder order) {
  return KernelInfoOfOrder(order, [](auto constant) {
    using Config = TracedBackwardConfig<DefaultSm90GemmConfig<constant()>>;
    return KernelInfoOf<Config>(reinterpret_cast<const void*>(&BackwardKernel<Config>));
  });
}

}  // namespace mok
