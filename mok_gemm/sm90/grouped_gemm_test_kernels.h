// Small variants of the grouped-GEMM kernel for the emulator, with planted bugs.
#pragma once

#include "mok_gemm/sm90/grouped_gemm_params.h"

namespace mok::testing {

struct GemmVariant {
  const char* name;
  GroupedGemmKernelInfo kernel;
};

// 128 x 64 tiles and 3 stages, the correct kernel.
GemmVariant SmallVariant(ColumnOrder order, GemmEpilogue epilogue);
// 64 x 128 tiles (one consumer warpgroup) and 2 stages.
GemmVariant OneWarpgroupVariant(ColumnOrder order, GemmEpilogue epilogue);
// The production configuration: 128 x 256 tiles and 4 stages.
GemmVariant DefaultVariant(ColumnOrder order, GemmEpilogue epilogue);
// SmallVariant with a mistake; each mistake is planted where it matters.
GemmVariant BuggyVariant(GemmBug bug);

}  // namespace mok::testing
