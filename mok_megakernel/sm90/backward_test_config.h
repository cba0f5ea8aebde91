// The small configuration of the emulated kernels: the stages of the product's tile are what
// DownGrad needs, but there are only two.
#pragma once

#include "mok_megakernel/sm90/backward_kernel.h"
#include "mok_megakernel/sm90/backward_launch.h"
#include "mok_megakernel/sm90/pass_kernel_info.h"

namespace mok::testing {

template <ColumnOrder kOrder>
using SmallBackwardGemm = Sm90GemmConfig<256, 2, 2, kOrder>;

}  // namespace mok::testing
