#include "mok_core/emulator/tests/mn_major_sm90.h"

#include "mok_core/device/device.h"
#include "mok_core/device/pipeline.h"
#include "mok_core/emulator/tests/kernel_table.h"

namespace mok::testing::mn_major {
namespace {

constexpr int kThreads = 128, kInstructionK = 16;
constexpr int kBothMnForm = 3;

struct alignas(1024) SharedStorage {
  unsigned char a[kRows * kDepth * 2];
  unsigned char b[kColumns * kDepth * 2];
  uint64_t full;
};

// An operand of kSize rows (K-major) or columns (MN-major), as boxes of one swizzle span: along K
// or along M or N.
template <OperandMajor kMajor, Swizzle kSwizzle, int kSize>
struct Operand {
  static constexpr bool kIsMn = kMajor == OperandMajor::kMn;
  static constexpr int kSpan = static_cast<int>(kSwizzle);  // bytes
  static constexpr int kBoxes = (kIsMn ? kSize : kDepth) * 2 / kSpan;
  static constexpr int kBoxBytes = (kIsMn ? kDepth : kSize) * kSpan;

  static MOK_DEVICE void Load(unsigned char* shared, const TensorMap* map, uint64_t* full,
                              int boxes) {
    for (int box = 0; box < boxes; ++box) {
      TensorLoad2d(shared + box * kBoxBytes, map, full, box * kSpan / 2, 0);
    }
  }

  // Bytes from one instruction's K to the next one's.
  static MOK_HOST_DEVICE constexpr uint32_t StepOffset(int step) {
    constexpr int kBytes = kInstructionK * 2;
    if (kIsMn) return step * kInstructionK * kSpan;
    return step * kBytes / kSpan * kBoxBytes + step * kBytes % kSpan;
  }
};

template <int kBug>
MOK_HOST_DEVICE constexpr uint64_t Descriptor(OperandMajor major, Swizzle swizzle) {
  OperandLayout layout =
      major == OperandMajor::kMn ? MnMajorLayout(swizzle, kDepth) : KMajorLayout(swizzle);
  if (kBug == kLeadingAndStrideSwapped)
    layout = {swizzle, layout.stride_bytes, layout.leading_bytes};
  if (kBug == kWrongLeading) layout.leading_bytes /= 2;
  if (kBug == kWrongStride) layout.stride_bytes /= 2;
  if (kBug == kWrongSwizzle) layout.swizzle = Swizzle::k64;
  if (kBug == kNoSwizzle) layout.swizzle = Swizzle::kNone;
  return OperandDescriptorSm90(layout);
}

template <int kForm, int kBug>
MOK_DEVICE void Multiply(const Params& p, SharedStorage& s) {
  constexpr Form kThis = kForms[kForm];
  using A = Operand<kThis.major_a, kThis.swizzle, kRows>;
  using B = Operand<kThis.major_b, kThis.swizzle, kColumns>;
  const int thread = static_cast<int>(ThreadIndex().x), lane = thread % 32;
  if (thread == 0) {
    MOK_NAME(&s.full, "full", -1);
    MOK_NAME(s.a, "a", -1);
    MOK_NAME(s.b, "b", -1);
    MbarrierInit(&s.full, 1);
    FenceMbarrierInit();
  }
  SyncBlock();
  if (thread == 0) {
    constexpr int kBoxesOfB = B::kBoxes - (kBug == kLastBoxMissing ? 1 : 0);
    MbarrierArriveExpectTransaction(&s.full, A::kBoxes * A::kBoxBytes + kBoxesOfB * B::kBoxBytes);
    A::Load(s.a, &p.a, &s.full, A::kBoxes);
    B::Load(s.b, &p.b, &s.full, kBoxesOfB);
  }
  SyncWarp();
  SpinWait().ForBarrier(&s.full, 0);
  constexpr int kTransposeA = A::kIsMn && kBug != kNotTransposedA ? 1 : 0;
  constexpr int kTransposeB = B::kIsMn && kBug != kNotTransposedB ? 1 : 0;
  const uint64_t a =
      Descriptor<kBug>(kThis.major_a, kThis.swizzle) | DescriptorAddress(SharedAddress(s.a));
  const uint64_t b =
      Descriptor<kBug>(kThis.major_b, kThis.swizzle) | DescriptorAddress(SharedAddress(s.b));
  float accumulator[kColumns / 2];
  WgmmaFence();
  MOK_UNROLL
  for (int step = 0; step < kDepth / kInstructionK; ++step) {
    const int from = kBug == kWrongStep ? 0 : step;
    WgmmaBf16<kColumns, kTransposeA, kTransposeB>(
        accumulator, AdvanceDescriptor(a, A::StepOffset(from)),
        AdvanceDescriptor(b, B::StepOffset(step)), step > 0);
  }
  WgmmaCommitGroup();
  WgmmaWaitGroup<0>(accumulator);
  MOK_UNROLL
  for (int i = 0; i < kColumns / 2; ++i) {
    const int row = thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    p.c[row * kColumns + column] = accumulator[i];
  }
}

template <int kForm>
MOK_KERNEL(kThreads, 1)
MultiplyForm(MOK_GRID_CONSTANT(Params) p) {
  MOK_SHARED_STORAGE(SharedStorage, s);
  Multiply<kForm, kCorrect>(p, s);
}

template <int kBug>
MOK_KERNEL(kThreads, 1)
MultiplyBuggy(MOK_GRID_CONSTANT(Params) p) {
  MOK_SHARED_STORAGE(SharedStorage, s);
  Multiply<kBothMnForm, kBug>(p, s);
}

template <int... kFormIndices>
const void* AddressOfForm(int form, std::integer_sequence<int, kFormIndices...>) {
  const void* const addresses[] = {reinterpret_cast<const void*>(&MultiplyForm<kFormIndices>)...};
  return addresses[form];
}

}  // namespace

TestKernel FormKernel(int form) {
  return {AddressOfForm(form, std::make_integer_sequence<int, kNumForms>()), kThreads,
          sizeof(SharedStorage)};
}

TestKernel BuggyKernel(int bug) {
  return {MOK_KERNEL_TABLE(MultiplyBuggy, kBugCount, bug), kThreads, sizeof(SharedStorage)};
}

}  // namespace mok::testing::mn_major
