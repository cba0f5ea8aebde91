// Small backward kernels for the emulator: 128 x 256 tiles, two stages.
#pragma once

#include "mok_megakernel/sm90/backward_launch.h"

namespace mok::testing {

// The correct kernel, and the one that traces.
PassKernelInfo SmallBackwardKernel(ColumnOrder order);
PassKernelInfo SmallTracedBackwardKernel(ColumnOrder order);

// The kernel with a planted mistake and natural order. bug: PassBug.
PassKernelInfo BackwardKernelWithBug(int bug);

}  // namespace mok::testing
