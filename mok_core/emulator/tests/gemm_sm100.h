// A GEMM on tcgen05 for tests: D = A B^T, bf16 in, fp32 out. Tiles come from cluster launch
// control; accumulators are double-buffered in tensor memory.
#pragma once

#include "mok_core/device/types.h"
#include "mok_core/emulator/tests/test_kernel.h"

namespace mok::testing::gemm_sm100 {

constexpr int kTileM = 128, kTileN = 128, kTileK = 64;

enum Bug {
  kCorrect,
  kHalfOfN,
  kNoFenceAfter,
  kNoAccumulatorWait,
  kNoAccumulatorCommit,
  kNoFree,
  kWrongLanes,
  kNoWaitLoad,
  kSm90Descriptor,
  kResponseBytes,
  kNoResponseRelease,
  kStageFreedByThread,
  kColumnOverrun,
  kAccumulateAtStart,
  kNoFenceBefore,
  kLaneZeroReleasesEarly,
  kBugCount
};

struct Params {
  TensorMap a, b;  // A [M, K], B [N, K] bf16
  float* d;        // [M, N]
  int32_t n, k, tiles_n;
};

// Launched with one block per tile.
TestKernel GemmKernel(int bug);

}  // namespace mok::testing::gemm_sm100
