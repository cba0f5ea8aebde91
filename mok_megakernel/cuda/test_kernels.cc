// The API links whatever kernels there are: in tests the emulator's small ones.
#include "mok_megakernel/sm90/backward_test_kernels.h"
#include "mok_megakernel/sm90/forward_test_kernels.h"

namespace mok {

ForwardKernelInfo ForwardKernelOf(ColumnOrder order) { return testing::SmallForwardKernel(order); }

PassKernelInfo BackwardKernelOf(ColumnOrder order) { return testing::SmallBackwardKernel(order); }

}  // namespace mok
