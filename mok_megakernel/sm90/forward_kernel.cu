// The forward kernel as it ships.
#include "mok_megakernel/sm90/forward_kernel.h"
#include "mok_megakernel/sm90/forward_launch.h"
#include "mok_megakernel/sm90/pass_kernel_info.h"

namespace mok {

ForwardKernelInfo ForwardKernelOf(ColumnOrder order) {
  return KernelInfoOfOrder(order, [](auto constant) {
    using Config = Sm90ForwardConfig<DefaultSm90GemmConfig<constant()>>;
    return KernelInfoOf<Config>(reinterpret_cast<const void*>(&ForwardKernel<Config>));
  });
}

}  // namespace mok
