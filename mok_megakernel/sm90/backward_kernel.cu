// The backward kernel as it ships.
#include "mok_megakernel/sm90/backward_kernel.h"

#include "mok_megakernel/sm90/backward_launch.h"

namespace mok {
namespace {

template <ColumnOrder kOrder>
PassKernelInfo KernelInfo() {
  using Gemm = DefaultSm90GemmConfig<kOrder>;
  using Config = Sm90BackwardConfig<Gemm>;
  return {reinterpret_cast<const void*>(&BackwardKernel<Config>), sizeof(PassStorage<Config>),
          Gemm::kTileN, Config::kChunkBytes, PassStorage<Config>::kDedicatedChunkBytes};
}

}  // namespace

PassKernelInfo BackwardKernelOf(ColumnOrder order) {
  return order == ColumnOrder::kPermuted ? KernelInfo<ColumnOrder::kPermuted>()
                                         : KernelInfo<ColumnOrder::kNatural>();
}

}  // namespace mok
