// The backward kernel as it ships.
#include "mok_megakernel/sm90/backward_kernel.h"
#include "mok_megakernel/sm90/backward_launch.h"
#include "mok_megakernel/sm90/pass_kernel_info.h"

namespace mok {
namespace {

template <ColumnOrder kOrder>
PassKernelInfo KernelInfo() {
  using Config = Sm90BackwardConfig<DefaultSm90GemmConfig<kOrder>>;
  return KernelInfoOf<Config>(reinterpret_cast<const void*>(&BackwardKernel<Config>));
}

}  // namespace

PassKernelInfo BackwardKernelOf(ColumnOrder order) {
  return order == ColumnOrder::kPermuted ? KernelInfo<ColumnOrder::kPermuted>()
                                         : KernelInfo<ColumnOrder::kNatural>();
}

}  // namespace mok
