#include "mok_core/emulator/tests/checks_sm90.h"

#include "mok_core/device/device.h"
#include "mok_core/emulator/tests/kernel_table.h"

namespace mok::testing::checks {
namespace {

constexpr int kThreads = 64;

struct alignas(128) SharedStorage {
  uint32_t words[32];
  uint64_t barrier;
};

template <int kCase>
MOK_DEVICE void GlobalMemory(const Params& p) {
  if (kCase == kLoadOutOfBounds) p.output[0] = p.data[64];
  if (kCase == kLoadFreed) p.output[0] = p.freed[3];
  if (kCase == kLoadUninitialized) p.output[0] = p.uninitialized[3];
  if (kCase == kLoadHostPointer) p.output[0] = *p.host;
  if (kCase == kWriteParameters) const_cast<Params&>(p).host = nullptr;
  if (kCase == kMisalignedVector) {
    p.output[0] = LoadVector(reinterpret_cast<const Word4*>(p.data + 1)).x;
  }
  if (kCase == kNonCoherentInput) p.output[0] = LoadNonCoherent(p.data + 5);
  if (kCase == kNonCoherentOutput) {
    p.output[0] = 1;
    p.output[1] = LoadNonCoherent(p.output);
  }
  if (kCase == kMappedHostMemory) *p.mapped = p.data[1];
  if (kCase == kMappedHostFlag && LoadAcquireSys(p.mapped) == 0) {
    StoreReleaseSys(p.mapped, p.data[1]);
  }
  if (kCase == kMappedHostReduction) ReduceAddReleaseSys(p.mapped, p.data[1]);
  if (kCase == kMappedHostReductionGpu) ReduceAddRelaxedGpu(p.mapped, p.data[1]);
  if (kCase == kMappedHostAdd) AtomicAddAcquireReleaseSys(p.mapped, p.data[1]);
  if (kCase == kMappedHostCompareSwap) AtomicCompareSwapAcquireReleaseSys(p.mapped, 0, 1);
}

// Thread 0 passes data[0] to thread 32, which is in the other warp.
template <int kCase>
MOK_DEVICE void Send(const Params& p) {
  if (kCase == kStoreAfterUnorderedLoad) {
    p.output[1] = p.data[0];
    return;
  }
  p.data[0] = 7;
  if (kCase == kRelaxedFlag) StoreRelaxedGpu(p.flag, uint32_t{1});
  if (kCase == kRelaxedFlagWithFences) {
    FenceAcquireReleaseGpu();
    StoreRelaxedGpu(p.flag, uint32_t{1});
  }
  if (kCase == kReleaseAcquireFlag) StoreReleaseGpu(p.flag, uint32_t{1});
  if (kCase == kStoreEndsRelease) {
    StoreReleaseGpu(p.flag, uint32_t{1});
    StoreRelaxedGpu(p.flag, uint32_t{2});
  }
  if (kCase == kUnorderedAtomics) ReduceAddRelaxedGpu(p.flag, uint32_t{1});
}

template <int kCase>
MOK_DEVICE void Receive(const Params& p) {
  if (kCase == kStoreAfterUnorderedLoad || kCase == kUnorderedStores) {
    p.data[0] = 8;
    return;
  }
  if (kCase == kUnorderedAtomics) {
    ReduceAddRelaxedGpu(p.flag, uint32_t{1});
    return;
  }
  const uint32_t wanted = kCase == kStoreEndsRelease ? 2 : 1;
  if (kCase == kRelaxedFlag || kCase == kRelaxedFlagWithFences) {
    while (LoadRelaxedGpu(p.flag) != wanted) {
    }
    if (kCase == kRelaxedFlagWithFences) FenceAcquireReleaseGpu();
  } else if (kCase != kOrderedByBarrier) {
    while (LoadAcquireGpu(p.flag) != wanted) {
    }
  }
  p.output[0] = p.data[0];
}

template <int kCase>
MOK_DEVICE void SharedMemory(const Params& p, SharedStorage& s) {
  if (kCase == kLoadUninitializedShared) p.output[0] = s.words[2];
  if (kCase == kSharedOutOfBounds) *(reinterpret_cast<volatile uint32_t*>(&s) + 64) = 1;
  if (kCase == kBarrierNotInitialized) MbarrierArrive(&s.barrier);
  if (kCase == kBarrierInitializedTwice) {
    MbarrierInit(&s.barrier, 1);
    MbarrierInit(&s.barrier, 1);
  }
  if (kCase == kBarrierOverwritten) {
    MbarrierInit(&s.barrier, 1);
    *reinterpret_cast<volatile uint64_t*>(&s.barrier) = 0;
    MbarrierArrive(&s.barrier);
  }
  if (kCase == kTooManyArrivals) {
    MbarrierInit(&s.barrier, 2);
    MbarrierExpectTransaction(&s.barrier, 16);  // keeps the phase open
    for (int i = 0; i < 3; ++i) MbarrierArrive(&s.barrier);
  }
  if (kCase == kInvalidatedBarrier) {
    MbarrierInit(&s.barrier, 1);
    MbarrierInvalidate(&s.barrier);
    MbarrierArrive(&s.barrier);
  }
}

template <int kCase>
MOK_DEVICE void Copies(const Params& p, SharedStorage& s) {
  constexpr bool kLoads = kCase == kLoadStoredGlobal || kCase == kLoadStoredGlobalSharedFence ||
                          kCase == kLoadStoredGlobalFenced || kCase == kExitWithTransferInFlight;
  if (kLoads) {
    MbarrierInit(&s.barrier, 1);
    FenceMbarrierInit();
    if (kCase != kExitWithTransferInFlight) p.data[0] = 5;
    if (kCase == kLoadStoredGlobalSharedFence) FenceProxyAsyncShared();
    if (kCase == kLoadStoredGlobalFenced) FenceProxyAsyncGlobal();
    MbarrierArriveExpectTransaction(&s.barrier, 64);
    BulkLoad(s.words, p.data, 64, &s.barrier);
    if (kCase == kExitWithTransferInFlight) return;
    while (!MbarrierTryWait(&s.barrier, 0)) {
    }
    p.output[0] = s.words[0];
  }
  if (kCase == kBulkSizeNotSixteen) BulkStore(p.output, s.words, 24);
  if (kCase == kBulkNotWaited || kCase == kBulkNotCommitted) {
    s.words[0] = 1;
    FenceProxyAsyncShared();
    BulkStore(p.output, s.words, 16);
    if (kCase == kBulkNotWaited) BulkCommitGroup();
  }
}

template <int kCase>
MOK_KERNEL(kThreads, 1)
Checks(MOK_GRID_CONSTANT(Params) p) {
  MOK_SHARED_STORAGE(SharedStorage, s);
  const int thread = static_cast<int>(ThreadIndex().x);
  constexpr bool kExchange = kCase >= kUnorderedStores && kCase <= kUnorderedAtomics;
  if (kExchange) {
    if (thread == 0) Send<kCase>(p);
    if (kCase == kOrderedByBarrier) SyncBlock();
    if (thread == 32) Receive<kCase>(p);
    return;
  }
  if (kCase == kUniformValue) p.output[thread] = Uniform(thread / 32);
  if (kCase == kUniformOfDifferentLanes) p.output[thread] = Uniform(thread / 33);
  if (kCase == kDivergentCollective && thread < 32) {
    if (thread < 16) {
      SyncWarp();
    } else {
      Ballot(true);
    }
  }
  if (thread != 0) return;
  GlobalMemory<kCase>(p);
  SharedMemory<kCase>(p, s);
  Copies<kCase>(p, s);
  if (kCase == kTrap) Trap();
  MOK_EXPECT(kCase != kBrokenExpectation);
}

}  // namespace

TestKernel ChecksKernel(int which) {
  return {MOK_KERNEL_TABLE(Checks, kCaseCount, which), kThreads, sizeof(SharedStorage)};
}

}  // namespace mok::testing::checks
