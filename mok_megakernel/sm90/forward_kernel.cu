// The forward kernel as it ships.
#include "mok_megakernel/sm90/forward_kernel.h"

#include "mok_megakernel/sm90/forward_launch.h"

namespace mok {
namespace {

template <ColumnOrder kOrder>
ForwardKernelInfo KernelInfo() {
  using Gemm = DefaultSm90GemmConfig<kOrder>;
  using Config = Sm90ForwardConfig<Gemm>;
  return {reinterpret_cast<const void*>(&ForwardKernel<Config>), sizeof(PassStorage<Config>),
          Gemm::kTileN, Config::kChunkBytes, PassStorage<Config>::kDedicatedChunkBytes};
}

}  // namespace

ForwardKernelInfo ForwardKernelOf(ColumnOrder order) {
  return order == ColumnOrder::kPermuted ? KernelInfo<ColumnOrder::kPermuted>()
                                         : KernelInfo<ColumnOrder::kNatural>();
}

}  // namespace mok
