// Variants of the backward's kernel for the emulator, with planted bugs.
#pragma once

#include "mok_gemm/sm90/backward_gemm_params.h"
#include "mok_gemm/sm90/backward_test_problem.h"

namespace mok::testing {

struct BackwardVariant {
  const char* name;
  BackwardTileSize tile;
  BackwardGemmKernelInfo kernel;
};

// 128 x 256 tiles, two stages.
BackwardVariant TwoStageVariant();
// 64 x 128 tiles (one consumer warpgroup), three stages.
BackwardVariant OneWarpgroupBackwardVariant();
// The production configuration: 128 x 256 tiles and 4 stages.
BackwardVariant DefaultBackwardVariant();
// TwoStageVariant with a mistake.
BackwardVariant BuggyBackwardVariant(BackwardBug bug);

}  // namespace mok::testing
