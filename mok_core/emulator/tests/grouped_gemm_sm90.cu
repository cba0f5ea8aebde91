// One producer warpgroup (one thread works), two consumer warpgroups, a four-stage ring.
#include "mok_core/emulator/tests/grouped_gemm_sm90.h"

#include "mok_core/device/descriptor.h"
#include "mok_core/device/device.h"
#include "mok_core/device/pipeline.h"
#include "mok_core/emulator/tests/kernel_table.h"

namespace mok::testing::grouped_gemm {
namespace {

struct alignas(1024) SharedStorage {
  unsigned char a[kStages][kTileM * kTileK * 2];
  unsigned char b[kStages][kTileN * kTileK * 2];
  uint16_t staging[2][64 * kStoreColumns];  // per consumer warpgroup
  uint64_t full[kStages], empty[kStages];
};

struct Tile {
  int group, row_begin, row_end, column;
};

MOK_DEVICE bool FindTile(const Params& p, int index, Tile& tile) {
  const int tiles_n = p.n / kTileN;
  for (int g = 0; g < p.groups; ++g) {
    const int begin = p.offsets[g], end = p.offsets[g + 1];
    const int tiles = (end - begin + kTileM - 1) / kTileM * tiles_n;
    if (index < tiles) {
      tile = {g, begin + index / tiles_n * kTileM, end, index % tiles_n * kTileN};
      return true;
    }
    index -= tiles;
  }
  return false;
}

struct RingPosition {
  uint32_t stage = 0, phase = 0;
  MOK_DEVICE void Advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

MOK_DEVICE void WaitFor(uint64_t* barrier, uint32_t parity) {
  SpinWait().ForBarrier(barrier, parity);
}

template <int kBug>
MOK_DEVICE void Initialize(SharedStorage& s) {
  for (int i = 0; i < kStages; ++i) {
    MOK_NAME(&s.full[i], "full", i);
    MOK_NAME(&s.empty[i], "empty", i);
    MOK_NAME(s.a[i], "a", i);
    MOK_NAME(s.b[i], "b", i);
    MbarrierInit(&s.full[i], 1);
    MbarrierInit(&s.empty[i], kBug == kEmptyCountTooHigh ? 3 : 2);
  }
  MOK_NAME(s.staging[0], "staging", 0);
  MOK_NAME(s.staging[1], "staging", 1);
  if (kBug != kNoInitFence) FenceMbarrierInit();
}

template <int kBug>
MOK_DEVICE void Produce(const Params& p, SharedStorage& s) {
  DecreaseRegisters<40>();
  const int thread = static_cast<int>(ThreadIndex().x);
  if (thread / 32 != 0) return;
  if (!(kBug == kTwoProducers ? thread < 2 : ElectOne())) return;
  constexpr int kBytes = (kTileM + kTileN) * kTileK * 2 + (kBug == kBytesTooFew    ? -1024
                                                           : kBug == kBytesTooMany ? 1024
                                                                                   : 0);
  RingPosition ring;
  Tile tile;
  for (int i = BlockIndex().x; FindTile(p, i, tile); i += GridDimensions().x) {
    for (int k = 0; k < p.k; k += kTileK, ring.Advance()) {
      if (kBug != kSkipEmptyWait) {
        WaitFor(&s.empty[ring.stage], ring.phase ^ (kBug == kWrongEmptyPhase ? 0 : 1));
      }
      uint64_t* full = &s.full[ring.stage];
      MbarrierArriveExpectTransaction(full, kBytes);
      TensorLoad2d(s.a[ring.stage], &p.a, full, k, tile.row_begin);
      TensorLoad2d(s.b[ring.stage], &p.b, full, k,
                   tile.group * p.n + tile.column + (kBug == kWrongCoordinate ? 8 : 0));
    }
  }
}

template <int kBug>
MOK_DEVICE void Accumulate(const Params& p, SharedStorage& s, RingPosition& ring, int consumer,
                           float (&accumulator)[kTileN / 2]) {
  constexpr OperandLayout kLayout{kBug == kWrongSwizzleInDescriptor ? Swizzle::k64 : Swizzle::k128,
                                  16, kBug == kWrongStride ? 512u : 1024u};
  constexpr uint64_t kDescriptor = OperandDescriptorSm90(kLayout);
  const int thread = static_cast<int>(ThreadIndex().x) % 128;
  for (int k = 0; k < p.k; k += kTileK, ring.Advance()) {
    if (kBug != kSkipFullWait) {
      WaitFor(&s.full[ring.stage], ring.phase ^ (kBug == kWrongFullPhase ? 1 : 0));
    }
    const uint32_t a = SharedAddress(s.a[ring.stage]) + consumer * 64 * kTileK * 2;
    const uint32_t b = SharedAddress(s.b[ring.stage]);
    if (kBug != kNoWgmmaFence) WgmmaFence();
    MOK_UNROLL
    for (int j = 0; j < kTileK / 16; ++j) {
      const uint32_t bytes = j * (kBug == kWrongKAdvance ? 16 : 32);
      WgmmaBf16<kTileN>(accumulator, AdvanceDescriptor(kDescriptor | DescriptorAddress(a), bytes),
                        AdvanceDescriptor(kDescriptor | DescriptorAddress(b), bytes), k + j > 0);
    }
    WgmmaCommitGroup();
    if (kBug == kEmptyBeforeWgmmaWait && thread == 0) MbarrierArrive(&s.empty[ring.stage]);
    if (kBug == kWgmmaWaitTooLate) {
      if (k + kTileK >= p.k) WgmmaWaitGroup<1>(accumulator);
    } else {
      WgmmaWaitGroup<0>(accumulator);
    }
    const bool releases = kBug == kOneWarpgroupReleases
                              ? consumer == 0 && thread < 2
                              : kBug != kEmptyBeforeWgmmaWait && thread == 0;
    if (releases) MbarrierArrive(&s.empty[ring.stage]);
  }
}

// Registers -> shared memory -> one bulk copy per valid row.
template <int kBug>
MOK_DEVICE void Store(const Params& p, SharedStorage& s, const Tile& tile, int consumer,
                      const float (&accumulator)[kTileN / 2]) {
  const int thread = static_cast<int>(ThreadIndex().x) % 128, lane = thread % 32;
  const int first_row = tile.row_begin + consumer * 64;
  const int end_row = kBug == kStoreOutOfBounds ? 1 << 30 : tile.row_end;
  uint16_t* staging = s.staging[consumer];
  MOK_UNROLL
  for (int c = 0; c < kTileN; c += kStoreColumns) {
    MOK_UNROLL
    for (int j = 0; j < kStoreColumns / 8; ++j) {
      MOK_UNROLL
      for (int h = 0; h < 2; ++h) {
        const int i = (c / 8 + j) * 4 + h * 2;
        const int row = thread / 32 * 16 + lane / 4 + h * 8, column = j * 8 + lane % 4 * 2;
        *reinterpret_cast<uint32_t*>(&staging[row * kStoreColumns + column]) =
            PackBFloat16(accumulator[i], accumulator[i + 1]);
      }
    }
    if (kBug != kNoProxyFence) FenceProxyAsyncShared();
    if (kBug != kNoStagingBarrier) {
      NamedBarrierSync(1 + consumer, kBug == kNamedBarrierCount ? 160 : 128);
    }
    if (thread == 0) {
      for (int r = 0; r < 64 && first_row + r < end_row; ++r) {
        uint16_t* row = p.c + static_cast<size_t>(first_row + r) * p.n + tile.column + c;
        BulkStore(row, staging + r * kStoreColumns, kStoreColumns * 2);
      }
      BulkCommitGroup();
      if (kBug != kNoBulkWaitRead) BulkWaitGroupRead<0>();
    }
    NamedBarrierSync(1 + consumer, 128);
  }
  if (thread != 0) return;
  if (kBug == kDoneAfterReadWait) {
    BulkWaitGroupRead<0>();
  } else {
    BulkWaitGroup<0>();
  }
  if (kBug == kRelaxedDone) {
    ReduceAddRelaxedGpu(&p.done[tile.group], uint32_t{1});
  } else {
    ReduceAddReleaseGpu(&p.done[tile.group], uint32_t{1});
  }
}

template <int kBug>
MOK_DEVICE void Consume(const Params& p, SharedStorage& s, int consumer) {
  IncreaseRegisters<kBug == kRegisterPool ? 240 : 232>();
  RingPosition ring;
  Tile tile;
  for (int i = BlockIndex().x; FindTile(p, i, tile); i += GridDimensions().x) {
    float accumulator[kTileN / 2];
    Accumulate<kBug>(p, s, ring, consumer, accumulator);
    Store<kBug>(p, s, tile, consumer, accumulator);
  }
}

template <int kBug>
MOK_KERNEL(kThreads, 1)
GroupedGemm(MOK_GRID_CONSTANT(Params) p) {
  MOK_SHARED_STORAGE(SharedStorage, s);
  const int warpgroup = static_cast<int>(ThreadIndex().x) / 128;
  if (ThreadIndex().x == 0) Initialize<kBug>(s);
  if (kBug != kNoSyncAfterInit) SyncBlock();
  if (warpgroup == 0) {
    Produce<kBug>(p, s);
  } else {
    Consume<kBug>(p, s, warpgroup - 1);
  }
}

struct SumStorage {
  float part[4];
};

// One block of 128 threads per group: waits until the group is complete, then sums it.
template <int kBug>
MOK_KERNEL(128, 1)
SumGroups(MOK_GRID_CONSTANT(Params) p) {
  MOK_SHARED_STORAGE(SumStorage, s);
  const int group = BlockIndex().x, thread = ThreadIndex().x;
  const int begin = p.offsets[group], end = p.offsets[group + 1];
  const uint32_t wanted = (end - begin + kTileM - 1) / kTileM * (p.n / kTileN) * 2;
  if (thread == 0) {
    while (LoadAcquireGpu(&p.done[group]) != wanted) {
    }
  }
  SyncBlock();
  float sum = 0;
  for (int i = begin * p.n + thread; i < end * p.n; i += 128) {
    sum += BitsToFloat(static_cast<uint32_t>(p.c[i]) << 16);
  }
  MOK_UNROLL
  for (int d = 16; d > 0; d /= 2) sum += ShuffleXor(sum, d);
  if (thread % 32 == 0) s.part[thread / 32] = sum;
  if (kBug != kConsumerSkipsBarrier) SyncBlock();
  if (thread == 0) p.sums[group] = s.part[0] + s.part[1] + s.part[2] + s.part[3];
}

}  // namespace

TestKernel GroupedGemmKernel(int bug) {
  return {MOK_KERNEL_TABLE(GroupedGemm, kBugCount, bug), kThreads, sizeof(SharedStorage)};
}

TestKernel SumGroupsKernel(int bug) {
  return {MOK_KERNEL_TABLE(SumGroups, kBugCount, bug), 128, sizeof(SumStorage)};
}

}  // namespace mok::testing::grouped_gemm
