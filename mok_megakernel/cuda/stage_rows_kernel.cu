#include "mok_megakernel/cuda/stage_rows_kernel.h"

namespace mok {

const void* StageRowsKernelAddress() {
  return reinterpret_cast<const void*>(&StageRowsKernel<StageRowsBug::kNone>);
}

}  // namespace mok
