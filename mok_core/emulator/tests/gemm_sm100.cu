#include "mok_core/emulator/tests/gemm_sm100.h"

#include "mok_core/device/descriptor.h"
#include "mok_core/device/device.h"
#include "mok_core/device/pipeline.h"
#include "mok_core/emulator/tests/kernel_table.h"

namespace mok::testing::gemm_sm100 {
namespace {

constexpr int kStages = 3, kAccumulators = 2, kResponses = 2, kThreads = 256;
constexpr int kResponseReaders = 7;  // producer, multiplier, scheduler, four epilogue warps
constexpr uint32_t kTensorColumns = 256;

struct alignas(1024) SharedStorage {
  unsigned char a[kStages][kTileM * kTileK * 2], b[kStages][kTileN * kTileK * 2];
  Word4 response[kResponses];
  PipelineBarriers<kStages> stages;              // producer -> multiplier
  PipelineBarriers<kAccumulators> accumulators;  // multiplier -> epilogue
  PipelineBarriers<kResponses> responses;        // scheduler -> everyone
  uint32_t tensor_memory;
};

using Stages = Pipeline<kStages>;
using Accumulators = Pipeline<kAccumulators>;
using Responses = Pipeline<kResponses>;

// The next tile of this role; false: none. Releases the response if `release`.
template <int kBug>
MOK_DEVICE bool NextTile(SharedStorage& s, Responses& responses, int& tile, bool release,
                         bool whole_warp = false) {
  responses.Wait(SpinWait());
  Index3 block;
  const bool more = ClusterLaunchQuery(&s.response[responses.stage()], &block);
  FenceProxyAsyncShared();
  if (whole_warp) SyncWarp();  // all lanes have read the response before one releases it
  if (release && kBug != kNoResponseRelease) responses.Release();
  responses.Advance();
  tile = static_cast<int>(block.x);
  return more;
}

template <int kBug>
MOK_DEVICE void Produce(const Params& p, SharedStorage& s, int tile) {
  Responses responses(s.responses);
  Stages stages(s.stages);
  if (ElectOne()) {
    do {
      for (int k = 0; k < p.k; k += kTileK, stages.Advance()) {
        stages.Acquire(SpinWait());
        uint64_t* full = stages.ExpectBytes((kTileM + kTileN) * kTileK * 2);
        TensorLoad2d(s.a[stages.stage()], &p.a, full, k, tile / p.tiles_n * kTileM);
        TensorLoad2d(s.b[stages.stage()], &p.b, full, k, tile % p.tiles_n * kTileN);
      }
    } while (NextTile<kBug>(s, responses, tile, true));
  }
  SyncWarp();
}

template <int kBug>
MOK_DEVICE void MultiplyTile(const Params& p, SharedStorage& s, Stages& stages, uint32_t d) {
  constexpr OperandLayout kLayout = KMajorLayout(Swizzle::k128);
  constexpr uint64_t kDescriptor =
      kBug == kSm90Descriptor ? OperandDescriptorSm90(kLayout) : OperandDescriptorSm100(kLayout);
  constexpr uint32_t kInstruction =
      InstructionDescriptorBf16({kTileM, kBug == kHalfOfN ? kTileN / 2 : kTileN});
  for (int k = 0; k < p.k; k += kTileK, stages.Advance()) {
    stages.Wait(SpinWait());
    if (kBug != kNoFenceAfter) Tcgen05FenceAfter();
    const uint64_t a = kDescriptor | DescriptorAddress(SharedAddress(s.a[stages.stage()]));
    const uint64_t b = kDescriptor | DescriptorAddress(SharedAddress(s.b[stages.stage()]));
    for (int j = 0; j < kTileK / 16; ++j) {
      Tcgen05MmaF16(d, AdvanceDescriptor(a, 32 * j), AdvanceDescriptor(b, 32 * j), kInstruction,
                    kBug == kAccumulateAtStart || k + j > 0);
    }
    uint64_t* empty = &s.stages.empty[stages.stage()];
    if (kBug == kStageFreedByThread) {
      MbarrierArrive(empty);
    } else {
      Tcgen05Commit(empty);
    }
  }
}

template <int kBug>
MOK_DEVICE void Multiply(const Params& p, SharedStorage& s, int tile, uint32_t tensor_memory) {
  Responses responses(s.responses);
  Stages stages(s.stages);
  Accumulators accumulators(s.accumulators);
  if (ElectOne()) {
    do {
      if (kBug != kNoAccumulatorWait) accumulators.Acquire(SpinWait());
      if (kBug != kNoFenceAfter) Tcgen05FenceAfter();
      const uint32_t d = tensor_memory + accumulators.stage() * kTileN;
      MultiplyTile<kBug>(p, s, stages, d + (kBug == kColumnOverrun ? 64 : 0));
      if (kBug != kNoAccumulatorCommit) {
        Tcgen05Commit(&s.accumulators.full[accumulators.stage()]);
      }
      accumulators.Advance();
    } while (NextTile<kBug>(s, responses, tile, true));
  }
  SyncWarp();
}

template <int kBug>
MOK_DEVICE void Schedule(SharedStorage& s) {
  Responses requests(s.responses), responses(s.responses);
  int tile;
  if (ElectOne()) {
    do {
      requests.Acquire(SpinWait());
      uint64_t* full = requests.ExpectBytes(kBug == kResponseBytes ? 8 : 16);
      ClusterLaunchTryCancel(&s.response[requests.stage()], full);
      requests.Advance();
    } while (NextTile<kBug>(s, responses, tile, true));
  }
  SyncWarp();
}

template <int kBug>
MOK_DEVICE void Store(const Params& p, SharedStorage& s, int tile, uint32_t tensor_memory) {
  Responses responses(s.responses);
  Accumulators accumulators(s.accumulators);
  const int thread = static_cast<int>(ThreadIndex().x) - 128, warp = thread / 32;
  const uint32_t quadrant = static_cast<uint32_t>(kBug == kWrongLanes ? warp ^ 1 : warp);
  bool more;
  do {
    const int row = tile / p.tiles_n * kTileM + thread, column = tile % p.tiles_n * kTileN;
    accumulators.Wait(SpinWait());
    Tcgen05FenceAfter();
    for (int n = 0; n < kTileN; n += 16) {
      uint32_t values[16];
      Tcgen05Load16(tensor_memory + (quadrant * 32 << 16) + accumulators.stage() * kTileN + n,
                    values);
      if (kBug != kNoWaitLoad) Tcgen05WaitLoad(values);
      float* out = p.d + static_cast<size_t>(row) * p.n + column + n;
      for (int i = 0; i < 16; ++i) out[i] = BitsToFloat(values[i]);
    }
    if (kBug != kNoFenceBefore) Tcgen05FenceBefore();
    SyncWarp();
    if (thread % 32 == 0) accumulators.Release();
    accumulators.Advance();
    more = NextTile<kBug>(s, responses, tile, thread % 32 == 0, kBug != kLaneZeroReleasesEarly);
    SyncWarp();
  } while (more);
}

template <int kBug>
MOK_KERNEL(kThreads, 1)
Gemm(MOK_GRID_CONSTANT(Params) p) {
  MOK_SHARED_STORAGE(SharedStorage, s);
  const int warp = static_cast<int>(ThreadIndex().x) / 32;
  if (ThreadIndex().x == 0) {
    Stages::Initialize(s.stages, 1, 1);
    Accumulators::Initialize(s.accumulators, 1, 4);
    Responses::Initialize(s.responses, 1, kResponseReaders);
    FenceMbarrierInit();
  }
  if (warp == 2) {
    TensorMemoryAllocate(&s.tensor_memory, kTensorColumns);
    TensorMemoryRelinquish();
  }
  Tcgen05FenceBefore();
  SyncBlock();
  Tcgen05FenceAfter();
  const uint32_t tensor_memory = s.tensor_memory;
  const int tile = static_cast<int>(BlockIndex().x);
  if (warp == 0) Produce<kBug>(p, s, tile);
  if (warp == 1) Multiply<kBug>(p, s, tile, tensor_memory);
  if (warp == 3) Schedule<kBug>(s);
  if (warp >= 4) Store<kBug>(p, s, tile, tensor_memory);
  Tcgen05FenceBefore();
  SyncBlock();
  Tcgen05FenceAfter();
  if (warp == 2 && kBug != kNoFree) TensorMemoryFree(tensor_memory, kTensorColumns);
}

}  // namespace

TestKernel GemmKernel(int bug) {
  return {MOK_KERNEL_TABLE(Gemm, kBugCount, bug), kThreads, sizeof(SharedStorage)};
}

}  // namespace mok::testing::gemm_sm100
