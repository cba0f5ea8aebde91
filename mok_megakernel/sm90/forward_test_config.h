// The small configuration of the emulated kernels.
#pragma once

#include "mok_megakernel/sm90/forward_kernel.h"
#include "mok_megakernel/sm90/forward_launch.h"
#include "mok_megakernel/sm90/pass_kernel_info.h"

namespace mok::testing {

template <ColumnOrder kOrder>
using SmallGemm = Sm90GemmConfig<64, 3, 2, kOrder>;

}  // namespace mok::testing
