// Warpgroup matrix multiply (PTX ISA 8.8 section 9.7.15, wgmma). sm_90a only.
//
// The accumulator of m64nNk16 is a fragment: register 4*j + 2*h + b of thread t holds row
// 16*(t/32) + (t%32)/4 + 8*h and column 8*j + 2*(t%4) + b.
#pragma once

#include "mok_core/ptx/compiler.h"

namespace mok {

// wgmma.fence: before the first wgmma after registers or shared memory were touched by the thread.
MOK_DEVICE void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group: closes the warpgroup's current group.
MOK_DEVICE void WgmmaCommitGroup() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// wgmma.wait_group: at most kPending younger groups are incomplete. The accumulators pass through
// it, so that the compiler cannot use them above the wait.
template <int kPending, int kRegisters>
MOK_DEVICE void WgmmaWaitGroup(float (&accumulator)[kRegisters]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  MOK_UNROLL
  for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+f"(accumulator[i])::"memory");
}

// wgmma.mma_async m64nNk16, bf16 operands in shared memory, fp32 accumulation:
// accumulator = A B + (accumulate ? accumulator : 0). The descriptors are built by
// OperandDescriptorSm90 and DescriptorAddress (mok_core/device/descriptor.h). kTransposeA/B: 1 for
// an MN-major operand.
template <int kN, int kTransposeA = 0, int kTransposeB = 0>
MOK_DEVICE void WgmmaBf16(float (&d)[kN / 2], uint64_t descriptor_a, uint64_t descriptor_b,
                          bool accumulate);

// Operand lists. MOK_TEN(t) names the registers t0 to t9; MOK_PART_n the first n of a decade.
#define MOK_PART_2(t) "%" #t "0, %" #t "1"
#define MOK_PART_4(t) MOK_PART_2(t) ", %" #t "2, %" #t "3"
#define MOK_PART_6(t) MOK_PART_4(t) ", %" #t "4, %" #t "5"
#define MOK_PART_8(t) MOK_PART_6(t) ", %" #t "6, %" #t "7"
#define MOK_TEN(t) MOK_PART_8(t) ", %" #t "8, %" #t "9, "
#define MOK_NAMES_16 MOK_TEN() MOK_PART_6(1)
#define MOK_NAMES_32 MOK_TEN() MOK_TEN(1) MOK_TEN(2) MOK_PART_2(3)
#define MOK_NAMES_48 MOK_TEN() MOK_TEN(1) MOK_TEN(2) MOK_TEN(3) MOK_PART_8(4)
#define MOK_NAMES_60 MOK_TEN() MOK_TEN(1) MOK_TEN(2) MOK_TEN(3) MOK_TEN(4) MOK_TEN(5)
#define MOK_NAMES_64 MOK_NAMES_60 MOK_PART_4(6)
#define MOK_NAMES_90 MOK_NAMES_60 MOK_TEN(6) MOK_TEN(7) MOK_TEN(8)
#define MOK_NAMES_96 MOK_NAMES_90 MOK_PART_6(9)
#define MOK_NAMES_128 MOK_NAMES_90 MOK_TEN(9) MOK_TEN(10) MOK_TEN(11) MOK_PART_8(12)

#define MOK_VALUES_4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define MOK_VALUES_8(i) MOK_VALUES_4(i), MOK_VALUES_4((i) + 4)
#define MOK_VALUES_16(i) MOK_VALUES_8(i), MOK_VALUES_8((i) + 8)
#define MOK_VALUES_32(i) MOK_VALUES_16(i), MOK_VALUES_16((i) + 16)
#define MOK_VALUES_48(i) MOK_VALUES_32(i), MOK_VALUES_16((i) + 32)
#define MOK_VALUES_64(i) MOK_VALUES_32(i), MOK_VALUES_32((i) + 32)
#define MOK_VALUES_96(i) MOK_VALUES_64(i), MOK_VALUES_32((i) + 64)
#define MOK_VALUES_128(i) MOK_VALUES_64(i), MOK_VALUES_64((i) + 64)

// r: registers; a, b, p, ta, tb: the operand numbers that follow them.
#define MOK_WGMMA(n, r, a, b, p, ta, tb)                                           \
  {                                                                                \
    asm volatile(                                                                  \
        "{\n"                                                                      \
        ".reg .pred p;\n"                                                          \
        "setp.ne.b32 p, %" #p                                                      \
        ", 0;\n"                                                                   \
        "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" MOK_NAMES_##r \
        "}, %" #a ", %" #b ", p, 1, 1, %" #ta ", %" #tb                            \
        ";\n"                                                                      \
        "}"                                                                        \
        : MOK_VALUES_##r(0)                                                        \
        : "l"(descriptor_a), "l"(descriptor_b), "r"(static_cast<int>(accumulate)), \
          "n"(kTransposeA), "n"(kTransposeB)                                       \
        : "memory");                                                               \
  }

template <int kN, int kTransposeA, int kTransposeB>
MOK_DEVICE void WgmmaBf16(float (&d)[kN / 2], uint64_t descriptor_a, uint64_t descriptor_b,
                          bool accumulate) {
  static_assert(kN == 32 || kN == 64 || kN == 96 || kN == 128 || kN == 192 || kN == 256,
                "add the operand list of this N");
  if constexpr (kN == 32) MOK_WGMMA(32, 16, 16, 17, 18, 19, 20)
  if constexpr (kN == 64) MOK_WGMMA(64, 32, 32, 33, 34, 35, 36)
  if constexpr (kN == 96) MOK_WGMMA(96, 48, 48, 49, 50, 51, 52)
  if constexpr (kN == 128) MOK_WGMMA(128, 64, 64, 65, 66, 67, 68)
  if constexpr (kN == 192) MOK_WGMMA(192, 96, 96, 97, 98, 99, 100)
  if constexpr (kN == 256) MOK_WGMMA(256, 128, 128, 129, 130, 131, 132)
}

#undef MOK_WGMMA
#undef MOK_PART_2
#undef MOK_PART_4
#undef MOK_PART_6
#undef MOK_PART_8
#undef MOK_TEN
#undef MOK_NAMES_16
#undef MOK_NAMES_32
#undef MOK_NAMES_48
#undef MOK_NAMES_60
#undef MOK_NAMES_64
#undef MOK_NAMES_90
#undef MOK_NAMES_96
#undef MOK_NAMES_128
#undef MOK_VALUES_4
#undef MOK_VALUES_8
#undef MOK_VALUES_16
#undef MOK_VALUES_32
#undef MOK_VALUES_48
#undef MOK_VALUES_64
#undef MOK_VALUES_96
#undef MOK_VALUES_128

}  // namespace mok
