#include "mok_core/emulator/tests/pair_sm100.h"

#include "mok_core/device/descriptor.h"
#include "mok_core/device/device.h"
#include "mok_core/device/pipeline.h"
#include "mok_core/emulator/tests/kernel_table.h"

namespace mok::testing::pair_sm100 {
namespace {

constexpr int kStages = 2, kRows = 128;  // of A and of B per block
constexpr uint32_t kTensorColumns = 256;

struct alignas(1024) SharedStorage {
  unsigned char a[kStages][kRows * kTileK * 2], b[kStages][kRows * kTileK * 2];
  PipelineBarriers<kStages> stages;
  uint64_t done;
  uint32_t tensor_memory;
};

template <int kBug>
MOK_DEVICE void Produce(const Params& p, SharedStorage& s, uint32_t rank) {
  Pipeline<kStages> stages(s.stages);
  constexpr uint32_t kBytes = (kBug == kBytesOfOneBlock ? 1 : 2) * 2 * kRows * kTileK * 2;
  const int row = static_cast<int>(rank) * kRows;
  for (int k = 0; k < p.k; k += kTileK, stages.Advance()) {
    stages.Acquire(SpinWait());
    if (rank == 0) stages.ExpectBytes(kBytes);
    uint64_t* own = &s.stages.full[stages.stage()];
    const uint32_t full = kBug == kOwnBarriers ? SharedAddress(own) : PairLeaderAddress(own);
    TensorLoad2dPair(s.a[stages.stage()], &p.a, full, k, row);
    TensorLoad2dPair(s.b[stages.stage()], &p.b, full, k, row);
  }
}

template <int kBug>
MOK_DEVICE void Multiply(const Params& p, SharedStorage& s, uint32_t d) {
  constexpr uint64_t kDescriptor = OperandDescriptorSm100(KMajorLayout(Swizzle::k128));
  constexpr uint32_t kInstruction = InstructionDescriptorBf16({kM, kN});
  Pipeline<kStages> stages(s.stages);
  for (int k = 0; k < p.k; k += kTileK, stages.Advance()) {
    stages.Wait(SpinWait());
    Tcgen05FenceAfter();
    const uint64_t a = kDescriptor | DescriptorAddress(SharedAddress(s.a[stages.stage()]));
    const uint64_t b = kDescriptor | DescriptorAddress(SharedAddress(s.b[stages.stage()]));
    for (int j = 0; j < kTileK / 16; ++j) {
      Tcgen05MmaF16Pair(d, AdvanceDescriptor(a, 32 * j), AdvanceDescriptor(b, 32 * j), kInstruction,
                        k + j > 0);
    }
    Tcgen05CommitPair(&s.stages.empty[stages.stage()], kBug == kCommitToOneBlock ? 1 : 3);
  }
  Tcgen05CommitPair(&s.done, 3);
}

template <bool kCluster>
MOK_DEVICE void Synchronize() {
  Tcgen05FenceBefore();
  SyncWarp();
  if (kCluster) {
    ClusterArriveRelease();
    ClusterWaitAcquire();
  } else {
    SyncBlock();
  }
  Tcgen05FenceAfter();
}

template <int kBug>
MOK_KERNEL(128, 1)
PairTile(MOK_GRID_CONSTANT(Params) p) {
  MOK_SHARED_STORAGE(SharedStorage, s);
  const int thread = static_cast<int>(ThreadIndex().x), warp = thread / 32;
  const uint32_t rank = ClusterRank();
  if (thread == 0) {
    Pipeline<kStages>::Initialize(s.stages, 1, 1);
    MbarrierInit(&s.done, 1);
    MOK_NAME(&s.done, "done", -1);
    FenceMbarrierInit();
  }
  if (warp == 2) {
    TensorMemoryAllocatePair(&s.tensor_memory, kTensorColumns);
    TensorMemoryRelinquishPair();
  }
  Synchronize<kBug != kNoClusterSyncAtStart>();
  const uint32_t d = s.tensor_memory;
  if (warp == 0 && ElectOne()) Produce<kBug>(p, s, rank);
  const uint32_t issuer = kBug == kOddBlockIssues ? 1 : 0;
  if (warp == 1 && rank == issuer && ElectOne()) Multiply<kBug>(p, s, d);
  SyncWarp();
  SpinWait().ForBarrier(&s.done, 0);
  Tcgen05FenceAfter();
  for (int n = 0; n < kN; n += 16) {
    uint32_t values[16];
    Tcgen05Load16(d + (static_cast<uint32_t>(warp * 32) << 16) + n, values);
    Tcgen05WaitLoad(values);
    float* out = p.d + (rank * kRows + thread) * kN + n;
    for (int i = 0; i < 16; ++i) out[i] = BitsToFloat(values[i]);
  }
  Synchronize<kBug != kNoClusterSyncAtEnd>();
  if (warp == 2) TensorMemoryFreePair(d, kTensorColumns);
}

}  // namespace

TestKernel PairKernel(int bug) {
  return {MOK_KERNEL_TABLE(PairTile, kBugCount, bug), 128, sizeof(SharedStorage)};
}

}  // namespace mok::testing::pair_sm100
