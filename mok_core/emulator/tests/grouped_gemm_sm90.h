// Persistent grouped GEMM for tests: C[rows of g] = A[rows of g] B[g]^T, bf16 in and out, fp32
// accumulation. A second kernel consumes C while the first still runs.
#pragma once

#include "mok_core/device/types.h"
#include "mok_core/emulator/tests/test_kernel.h"

namespace mok::testing::grouped_gemm {

constexpr int kTileM = 128, kTileN = 256, kTileK = 64, kStages = 4, kThreads = 384;
constexpr int kStoreColumns = 64;  // of C staged at once per warpgroup

enum Bug {
  kCorrect,
  kSkipFullWait,
  kSkipEmptyWait,
  kWrongFullPhase,
  kWrongEmptyPhase,
  kBytesTooFew,
  kBytesTooMany,
  kWrongSwizzleInDescriptor,
  kWrongSwizzleInMap,
  kEmptyCountTooHigh,
  kEmptyBeforeWgmmaWait,
  kNoProxyFence,
  kNoBulkWaitRead,
  kWgmmaWaitTooLate,
  kNoWgmmaFence,
  kWrongStride,
  kWrongKAdvance,
  kNoInitFence,
  kNoSyncAfterInit,
  kNamedBarrierCount,
  kStoreOutOfBounds,
  kNoStagingBarrier,
  kTwoProducers,
  kRegisterPool,
  kWrongCoordinate,
  kRelaxedDone,
  kDoneAfterReadWait,
  kOneWarpgroupReleases,
  kConsumerSkipsBarrier,
  kBugCount
};

struct Params {
  TensorMap a, b;          // A [M, K], B [groups * N, K], bf16
  const int32_t* offsets;  // [groups + 1], first row of each group
  int32_t groups, n, k;
  uint16_t* c;     // [M, N] bf16: GEMM -> consumer kernel
  uint32_t* done;  // [groups], tile halves written: GEMM -> consumer kernel
  float* sums;     // [groups], sum of C's rows of the group: consumer kernel -> host
};

// One block per worker. All bugs exist in the emulated build, only kCorrect in the CUDA build.
TestKernel GroupedGemmKernel(int bug);
// One block per group.
TestKernel SumGroupsKernel(int bug);

}  // namespace mok::testing::grouped_gemm
