// Small forward kernels for the emulator: 128 x 64 tiles.
#pragma once

#include "mok_megakernel/sm90/forward_launch.h"

namespace mok::testing {

// The correct kernel, and the one that traces.
ForwardKernelInfo SmallForwardKernel(ColumnOrder order);
ForwardKernelInfo SmallTracedForwardKernel(ColumnOrder order);

// Kernels with a planted mistake and natural order. bug: PassBug, ExchangeBug.
ForwardKernelInfo ForwardKernelWithBug(int bug);
ForwardKernelInfo ForwardKernelWithExchangeBug(int bug);

}  // namespace mok::testing
