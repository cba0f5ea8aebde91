// Twin of mok_core/ptx/wgmma.h.
#pragma once

#include "mok_core/emulator/twins/compiler.h"

namespace mok {

MOK_DEVICE void WgmmaFence() { emulator::WgmmaFence(); }
MOK_DEVICE void WgmmaCommitGroup() { emulator::WgmmaCommitGroup(); }
// The empty asm keeps the compiler from using accumulators that it loaded before the wait.
template <int kPending, int kRegisters>
MOK_DEVICE void WgmmaWaitGroup(float (&)[kRegisters]) {
  emulator::WgmmaWaitGroup(kPending);
  asm volatile("" ::: "memory");
}
template <int kN, int kTransposeA = 0, int kTransposeB = 0>
MOK_DEVICE void WgmmaBf16(float (&d)[kN / 2], uint64_t descriptor_a, uint64_t descriptor_b,
                          bool accumulate) {
  static_assert(kN == 32 || kN == 64 || kN == 96 || kN == 128 || kN == 192 || kN == 256,
                "add the operand list of this N");
  emulator::WgmmaBf16(
      d, {descriptor_a, descriptor_b, kN, accumulate, kTransposeA != 0, kTransposeB != 0});
}

}  // namespace mok
