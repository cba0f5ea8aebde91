#include "mok_core/emulator/tests/exchange_sm90.h"

#include "mok_core/device/device.h"
#include "mok_core/device/wait.h"
#include "mok_core/emulator/tests/kernel_table.h"

namespace mok::testing::exchange {
namespace {

constexpr int kThreads = 64;
constexpr uint32_t kRowBytes = kRowWords * 4;
enum Role { kPull, kPush };

struct alignas(128) SharedStorage {
  float row[kRowWords];
  uint64_t full;
};

// Copies rows from `source` to `destination` through shared memory; after each row, signal(row).
template <class Signal>
MOK_DEVICE void MoveRows(SharedStorage& s, const DeviceWait& wait, const float* source,
                         float* destination, Signal signal) {
  for (int row = 0; row < kRows; ++row) {
    MbarrierArriveExpectTransaction(&s.full, kRowBytes);
    BulkLoad(s.row, source + row * kRowWords, kRowBytes, &s.full);
    wait.ForBarrier(&s.full, row & 1);
    BulkStore(destination + row * kRowWords, s.row, kRowBytes);
    BulkCommitGroup();
    signal(row);
    BulkWaitGroupRead<0>();  // the next row reuses the staging
  }
}

template <int kBug>
MOK_DEVICE void SignalEntry(const Params& p) {
  if (kBug == kEntryReleaseGpuScope) {
    ReduceAddReleaseGpu(p.peer.entry, uint64_t{1});
  } else if (kBug == kEntryFenceGpuScope) {
    FenceAcquireReleaseGpu();
    ReduceAddRelaxedSys(p.peer.entry, uint64_t{1});
  } else {
    ReduceAddReleaseSys(p.peer.entry, uint64_t{1});
  }
}

// Writes x, meets the peer, pulls. One warp; lane 0 moves rows.
template <int kBug>
MOK_DEVICE void Pull(const Params& p, SharedStorage& s, DeviceWait& wait) {
  const int thread = static_cast<int>(ThreadIndex().x);
  for (int i = thread; i < kRows * kRowWords; i += kThreads) {
    p.own.x[i] = static_cast<float>(p.wait.rank * 1000 + i);
  }
  SyncBlock();
  if (thread != 0) return;
  SignalEntry<kBug>(p);
  wait.SetTask(0, 0);
  if (kBug == kEntryAcquireGpuScope) {
    if (!wait.ForCounterGpu(p.own.entry, 1)) return;
  } else if (kBug != kNoEntryWait) {
    if (!wait.ForCounterSys(p.own.entry, 1)) return;
  }
  if (kBug != kNoProxyFenceAfterEntry) FenceProxyAsyncGlobal();
  const float* source = p.peer.x + (kBug == kPullOutOfBounds ? kRowWords : 0);
  MoveRows(s, wait, source, p.ring, [&](int) {
    if (kBug == kSignalAfterReadWait) {
      BulkWaitGroupRead<0>();
    } else {
      BulkWaitGroup<0>();
    }
    if (kBug == kRelaxedRingSignal) {
      ReduceAddRelaxedGpu(p.ring_filled, uint64_t{1});
    } else {
      ReduceAddReleaseGpu(p.ring_filled, uint64_t{1});
    }
  });
  BulkWaitGroup<0>();
}

template <int kBug>
MOK_DEVICE bool PushAndMeet(const Params& p, SharedStorage& s, DeviceWait& wait) {
  wait.SetTask(1, 0);
  if (!wait.ForCounterGpu(p.ring_filled, kRows)) return false;
  if (kBug != kNoProxyFenceAfterRing) FenceProxyAsyncGlobal();
  MoveRows(s, wait, p.ring, p.peer.returned, [](int) {});
  if (kBug == kExitAfterReadWait) {
    BulkWaitGroupRead<0>();
  } else {
    BulkWaitGroup<0>();
  }
  if (kBug == kExitReleaseGpuScope) {
    ReduceAddReleaseGpu(p.peer.exit, uint64_t{1});
  } else {
    ReduceAddReleaseSys(p.peer.exit, uint64_t{1});
  }
  wait.SetTask(2, 0);
  return kBug == kNoExitWait || wait.ForCounterSys(p.own.exit, 1);
}

// Pushes the ring to the peer, meets it, sums what came back.
template <int kBug>
MOK_DEVICE void PushAndReduce(const Params& p, SharedStorage& s, DeviceWait& wait) {
  const int thread = static_cast<int>(ThreadIndex().x);
  if (thread == 0) PushAndMeet<kBug>(p, s, wait);
  SyncBlock();
  if (wait.aborted()) return;
  for (int column = thread; column < kRowWords; column += kThreads) {
    float sum = 0;
    for (int row = 0; row < kRows; ++row) sum += p.own.returned[row * kRowWords + column];
    if (kBug == kNonCoherentLoad) sum += LoadNonCoherent(&p.own.x[column]);
    p.sums[column] = sum;
  }
}

template <int kBug>
MOK_KERNEL(kThreads, 1)
Exchange(MOK_GRID_CONSTANT(Params) p) {
  MOK_SHARED_STORAGE(SharedStorage, s);
  const bool pulls = BlockIndex().x == 0;
  DeviceWait wait(p.wait, pulls ? kPull : kPush);
  if (ThreadIndex().x == 0) {
    MOK_NAME(&s.full, "full", -1);
    MbarrierInit(&s.full, 1);
    FenceMbarrierInit();
  }
  SyncBlock();
  if (pulls) {
    Pull<kBug>(p, s, wait);
  } else {
    PushAndReduce<kBug>(p, s, wait);
  }
}

}  // namespace

TestKernel ExchangeKernel(int bug) {
  return {MOK_KERNEL_TABLE(Exchange, kBugCount, bug), kThreads, sizeof(SharedStorage)};
}

}  // namespace mok::testing::exchange
