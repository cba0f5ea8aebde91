// One 256 x 256 tile over a pair of blocks for tests: tcgen05.mma.cta_group::2, M = 256. The tensor
// loads of both blocks complete on the even block's barrier.
#pragma once

#include "mok_core/device/types.h"
#include "mok_core/emulator/tests/test_kernel.h"

namespace mok::testing::pair_sm100 {

constexpr int kM = 256, kN = 256, kTileK = 64;

enum Bug {
  kCorrect,
  kOwnBarriers,
  kBytesOfOneBlock,
  kCommitToOneBlock,
  kOddBlockIssues,
  kNoClusterSyncAtStart,
  kNoClusterSyncAtEnd,
  kBugCount
};

struct Params {
  TensorMap a, b;  // [256, K] bf16 each
  float* d;        // [256, 256]
  int32_t k;
};

TestKernel PairKernel(int bug);

}  // namespace mok::testing::pair_sm100
