#include "mok_core/emulator/tests/block_scaled_sm100.h"

#include "mok_core/device/descriptor.h"
#include "mok_core/device/device.h"
#include "mok_core/device/pipeline.h"
#include "mok_core/emulator/tests/kernel_table.h"

namespace mok::testing::block_scaled {
namespace {

constexpr uint32_t kTensorColumns = 256;
constexpr uint32_t kScalesA = 128, kScalesB = 136;  // columns, after the accumulator's 128

struct alignas(1024) SharedStorage {
  unsigned char a[kSteps][kM * kStepK], b[kSteps][kN * kStepK];
  unsigned char scales_a[kSteps][kScaleBytes], scales_b[kSteps][kScaleBytes];
  uint64_t full, done;
  uint32_t tensor_memory;
};

template <int kBug>
MOK_DEVICE void Load(const Params& p, SharedStorage& s) {
  constexpr uint32_t kBytes =
      (kM + kN) * kStepK + (kBug == kScaleBytesMissing ? kScaleBytes : 2 * kScaleBytes);
  MbarrierArriveExpectTransaction(&s.full, kSteps * kBytes);
  for (int k = 0; k < kSteps; ++k) {
    TensorLoad2d(s.a[k], &p.a, &s.full, k * kStepK, 0);
    TensorLoad2d(s.b[k], &p.b, &s.full, k * kStepK, 0);
    BulkLoad(s.scales_a[k], p.scales_a + k * kScaleBytes, kScaleBytes, &s.full);
    BulkLoad(s.scales_b[k], p.scales_b + k * kScaleBytes, kScaleBytes, &s.full);
  }
}

template <int kBug>
MOK_DEVICE void Multiply(SharedStorage& s, uint32_t d) {
  constexpr uint64_t kOperand = OperandDescriptorSm100(KMajorLayout(Swizzle::k128));
  constexpr uint64_t kScales = OperandDescriptorSm100({Swizzle::kNone, 16, 128});
  SpinWait().ForBarrier(&s.full, 0);
  Tcgen05FenceAfter();
  for (int k = 0; k < kSteps; ++k) {
    const uint32_t scales_a = d + kScalesA + 4 * k, scales_b = d + kScalesB + 4 * k;
    if (kBug != kSecondCopyMissing || k == 0) {
      Tcgen05CopyScales(scales_a, kScales | DescriptorAddress(SharedAddress(s.scales_a[k])));
      Tcgen05CopyScales(scales_b, kScales | DescriptorAddress(SharedAddress(s.scales_b[k])));
    }
    const uint64_t a = kOperand | DescriptorAddress(SharedAddress(s.a[k]));
    const uint64_t b = kOperand | DescriptorAddress(SharedAddress(s.b[k]));
    for (int j = 0; j < kStepK / 32; ++j) {
      const uint32_t byte = kBug == kWrongScaleByte ? 0 : j;
      const BlockScaledOperands operands{AdvanceDescriptor(a, 32 * j), AdvanceDescriptor(b, 32 * j),
                                         kBug == kSwappedScales ? scales_b : scales_a,
                                         kBug == kSwappedScales ? scales_a : scales_b};
      Tcgen05MmaMxf8(d, operands, InstructionDescriptorMxf8({kM, kN}, byte, byte), k + j > 0);
    }
  }
  Tcgen05Commit(&s.done);
}

template <int kBug>
MOK_KERNEL(128, 1)
BlockScaled(MOK_GRID_CONSTANT(Params) p) {
  MOK_SHARED_STORAGE(SharedStorage, s);
  const int thread = static_cast<int>(ThreadIndex().x), warp = thread / 32;
  if (thread == 0) {
    MbarrierInit(&s.full, 1);
    MbarrierInit(&s.done, 1);
    FenceMbarrierInit();
  }
  if (warp == 2) {
    TensorMemoryAllocate(&s.tensor_memory, kTensorColumns);
    TensorMemoryRelinquish();
  }
  Tcgen05FenceBefore();
  SyncBlock();
  Tcgen05FenceAfter();
  const uint32_t d = s.tensor_memory;
  if (warp == 0 && ElectOne()) Load<kBug>(p, s);
  if (warp == 1 && ElectOne()) Multiply<kBug>(s, d);
  SyncWarp();
  SpinWait().ForBarrier(&s.done, 0);
  Tcgen05FenceAfter();
  for (int n = 0; n < kN; n += 16) {
    uint32_t values[16];
    Tcgen05Load16(d + (static_cast<uint32_t>(warp * 32) << 16) + n, values);
    Tcgen05WaitLoad(values);
    for (int i = 0; i < 16; ++i) p.d[thread * kN + n + i] = BitsToFloat(values[i]);
  }
  Tcgen05FenceBefore();
  SyncBlock();
  Tcgen05FenceAfter();
  if (warp == 2) TensorMemoryFree(d, kTensorColumns);
}

}  // namespace

TestKernel BlockScaledKernel(int bug) {
  return {MOK_KERNEL_TABLE(BlockScaled, kBugCount, bug), 128, sizeof(SharedStorage)};
}

}  // namespace mok::testing::block_scaled
