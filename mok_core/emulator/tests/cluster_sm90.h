// Clusters of two for tests: each block multicasts half of a tile to both, stores into its peer's
// shared memory, and signals a barrier there.
#pragma once

#include "mok_core/device/types.h"
#include "mok_core/emulator/tests/test_kernel.h"

namespace mok::testing::cluster_pair {

constexpr int kRows = 64, kColumns = 64;  // of one half tile, bf16

enum Bug {
  kCorrect,
  kNoRemoteArrive,
  kHalfOfTheBytes,
  kNoClusterSyncAtStart,
  kNoClusterSyncAtEnd,
  kRankOutOfRange,
  kArriveOnOwnBarrier,
  kArriveWithoutRelease,
  kWaitWithoutClusterAcquire,
  kBugCount
};

struct Params {
  TensorMap tiles;  // [2 * clusters * kRows, kColumns] bf16
  float* sums;      // [2 * clusters, kRows]: weighted row sums computed by the peer block
};

TestKernel ClusterPairKernel(int bug);

}  // namespace mok::testing::cluster_pair
