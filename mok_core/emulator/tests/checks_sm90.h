// One small mistake each, and their correct counterparts: what every check of the emulator is for.
#pragma once

#include "mok_core/device/types.h"
#include "mok_core/emulator/tests/test_kernel.h"

namespace mok::testing::checks {

enum Case {
  kNothing,
  // global memory
  kLoadOutOfBounds,
  kLoadFreed,
  kLoadUninitialized,
  kLoadHostPointer,
  kWriteParameters,
  kMisalignedVector,
  kNonCoherentInput,
  kNonCoherentOutput,
  kMappedHostMemory,
  kMappedHostFlag,
  kMappedHostReduction,
  kMappedHostReductionGpu,
  kMappedHostAdd,
  kMappedHostCompareSwap,
  // order between threads
  kUnorderedStores,
  kStoreAfterUnorderedLoad,
  kOrderedByBarrier,
  kRelaxedFlag,
  kRelaxedFlagWithFences,
  kReleaseAcquireFlag,
  kStoreEndsRelease,
  kUnorderedAtomics,
  // shared memory and barriers
  kLoadUninitializedShared,
  kSharedOutOfBounds,
  kBarrierNotInitialized,
  kBarrierInitializedTwice,
  kBarrierOverwritten,
  kTooManyArrivals,
  kInvalidatedBarrier,
  kDivergentCollective,
  kUniformValue,
  kUniformOfDifferentLanes,
  // asynchronous copies
  kBulkSizeNotSixteen,
  kBulkNotWaited,
  kBulkNotCommitted,
  kLoadStoredGlobal,
  kLoadStoredGlobalSharedFence,
  kLoadStoredGlobalFenced,
  kExitWithTransferInFlight,
  kTrap,
  kBrokenExpectation,
  kCaseCount
};

struct Params {
  uint32_t* data;           // [64], initialised
  uint32_t* uninitialized;  // [64]
  uint32_t* freed;          // [64], freed before the launch
  uint32_t* host;           // plain host memory
  uint32_t* mapped;         // [1], mapped host memory
  uint32_t* flag;           // [1], zero
  uint32_t* output;         // [64]
};

// One block of two warps.
TestKernel ChecksKernel(int which);

}  // namespace mok::testing::checks
