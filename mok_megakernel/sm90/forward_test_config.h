// The small configuration of the emulated kernels.
#pragma once

#include "mok_megakernel/sm90/forward_kernel.h"
#include "mok_megakernel/sm90/forward_launch.h"

namespace mok::testing {

template <ColumnOrder kOrder>
using SmallGemm = Sm90GemmConfig<64, 3, 2, kOrder>;

template <class Config>
ForwardKernelInfo SmallKernelInfo(const void* address) {
  return {address, sizeof(PassStorage<Config>), Config::Gemm::kTileN, Config::kChunkBytes,
          PassStorage<Config>::kDedicatedChunkBytes};
}

}  // namespace mok::testing
