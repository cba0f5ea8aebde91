#include "mok_megakernel/cuda/stage_rows_test_kernels.h"

#include "mok_core/emulator/tests/kernel_table.h"
#include "mok_megakernel/cuda/stage_rows_kernel.h"

namespace mok::testing {
namespace {

// The kernel as a template over a number.
template <int kBug>
constexpr auto& kKernelWithBug = StageRowsKernel<static_cast<StageRowsBug>(kBug)>;

}  // namespace

const void* StageRowsKernelWithBug(int bug) {
  return MOK_KERNEL_TABLE(kKernelWithBug, static_cast<int>(StageRowsBug::kCount), bug);
}

}  // namespace mok::testing
