#include "mok_core/emulator/tests/cluster_sm90.h"

#include "mok_core/device/device.h"
#include "mok_core/device/pipeline.h"
#include "mok_core/emulator/tests/kernel_table.h"

namespace mok::testing::cluster_pair {
namespace {

struct alignas(1024) SharedStorage {
  unsigned char tile[2][kRows * kColumns * 2];
  float from_peer[kRows];
  uint64_t full, peer;
};

template <int kBug>
MOK_DEVICE void Start(SharedStorage& s) {
  if (ThreadIndex().x == 0) {
    MOK_NAME(&s.full, "full", -1);
    MOK_NAME(&s.peer, "peer", -1);
    MOK_NAME(s.from_peer, "from_peer", -1);
    MOK_NAME(s.tile, "tile", -1);
    MbarrierInit(&s.full, 1);
    MbarrierInit(&s.peer, kRows);
    FenceMbarrierInit();
  }
  SyncWarp();
  if (kBug == kNoClusterSyncAtStart) {
    SyncBlock();
  } else {
    ClusterArriveRelease();
    ClusterWaitAcquire();
  }
}

// Row `row` of both halves, un-swizzled by hand: column weights 1.., half weights 1 and 2.
MOK_DEVICE float RowSum(const SharedStorage& s, int row) {
  float sum = 0;
  for (int half = 0; half < 2; ++half) {
    for (int chunk = 0; chunk < 8; ++chunk) {
      const auto* values = reinterpret_cast<const uint16_t*>(s.tile[half] + row * kColumns * 2 +
                                                             ((chunk ^ (row & 7)) << 4));
      for (int i = 0; i < 8; ++i) {
        const float value = BitsToFloat(static_cast<uint32_t>(values[i]) << 16);
        sum += value * static_cast<float>((chunk * 8 + i + 1) * (half + 1));
      }
    }
  }
  return sum;
}

template <int kBug>
MOK_KERNEL(128, 1)
ClusterPair(MOK_GRID_CONSTANT(Params) p) {
  MOK_SHARED_STORAGE(SharedStorage, s);
  const int thread = static_cast<int>(ThreadIndex().x);
  const uint32_t rank = ClusterRank(), other = rank ^ 1;
  Start<kBug>(s);
  if (thread == 0) {
    const int row = static_cast<int>(BlockIndex().x / 2 * 2 + rank) * kRows;
    MbarrierArriveExpectTransaction(&s.full,
                                    (kBug == kHalfOfTheBytes ? 1 : 2) * kRows * kColumns * 2);
    TensorLoad2dMulticast(s.tile[rank], &p.tiles, &s.full, 3, 0, row);
  }
  const SpinWait wait;
  wait.ForBarrier(&s.full, 0);
  if (thread < kRows) {
    float* to_peer = MapPointerToClusterRank(s.from_peer, kBug == kRankOutOfRange ? 2 : other);
    to_peer[thread] = RowSum(s, thread) + static_cast<float>(rank) * 1000;
    const uint32_t barrier =
        MapToClusterRank(SharedAddress(&s.peer), kBug == kArriveOnOwnBarrier ? rank : other);
    if (kBug == kArriveWithoutRelease) {
      MbarrierArriveRemote(barrier);
    } else if (kBug != kNoRemoteArrive || thread != 0) {
      MbarrierArriveReleaseCluster(barrier);
    }
  } else {
    if (kBug == kWaitWithoutClusterAcquire) {
      wait.ForBarrier(&s.peer, 0);
    } else {
      wait.ForBarrierCluster(&s.peer, 0);
    }
    p.sums[BlockIndex().x * kRows + thread - kRows] = s.from_peer[thread - kRows];
  }
  SyncWarp();
  if (kBug != kNoClusterSyncAtEnd) {  // the peer may still access this block's shared memory
    ClusterArriveRelease();
    ClusterWaitAcquire();
  }
}

}  // namespace

TestKernel ClusterPairKernel(int bug) {
  return {MOK_KERNEL_TABLE(ClusterPair, kBugCount, bug), 128, sizeof(SharedStorage)};
}

}  // namespace mok::testing::cluster_pair
