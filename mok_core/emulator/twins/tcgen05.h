// Twin of mok_core/ptx/tcgen05.h.
#pragma once

#include "mok_core/emulator/twins/ids.h"

namespace mok {

MOK_DEVICE void TensorMemoryAllocate(uint32_t* shared_result, uint32_t columns) {
  emulator::TensorMemoryAllocate(SharedAddress(shared_result), columns);
}
MOK_DEVICE void TensorMemoryFree(uint32_t address, uint32_t columns) {
  emulator::TensorMemoryFree(address, columns);
}
MOK_DEVICE void TensorMemoryRelinquish() { emulator::TensorMemoryRelinquish(); }
MOK_DEVICE void TensorMemoryAllocatePair(uint32_t* shared_result, uint32_t columns) {
  emulator::TensorMemoryAllocate(SharedAddress(shared_result), columns);
}
MOK_DEVICE void TensorMemoryFreePair(uint32_t address, uint32_t columns) {
  emulator::TensorMemoryFree(address, columns);
}
MOK_DEVICE void TensorMemoryRelinquishPair() { emulator::TensorMemoryRelinquish(); }
MOK_DEVICE void Tcgen05MmaF16(uint32_t d, uint64_t descriptor_a, uint64_t descriptor_b,
                              uint32_t instruction, bool accumulate) {
  emulator::Tcgen05MmaF16({d, descriptor_a, descriptor_b, instruction, accumulate, 0, 0}, false);
}
MOK_DEVICE void Tcgen05MmaF16Pair(uint32_t d, uint64_t descriptor_a, uint64_t descriptor_b,
                                  uint32_t instruction, bool accumulate) {
  emulator::Tcgen05MmaF16({d, descriptor_a, descriptor_b, instruction, accumulate, 0, 0}, true);
}
MOK_DEVICE void Tcgen05MmaMxf8(uint32_t d, const BlockScaledOperands& operands,
                               uint32_t instruction, bool accumulate) {
  emulator::Tcgen05MmaMxf8({d, operands.descriptor_a, operands.descriptor_b, instruction,
                            accumulate, operands.scales_a, operands.scales_b});
}
MOK_DEVICE void Tcgen05CopyScales(uint32_t destination, uint64_t descriptor) {
  emulator::Tcgen05CopyScales(destination, descriptor);
}
MOK_DEVICE void Tcgen05Commit(uint64_t* barrier) {
  emulator::Tcgen05Commit(SharedAddress(barrier));
}
MOK_DEVICE void Tcgen05CommitPair(uint64_t* barrier, uint16_t cta_mask) {
  emulator::Tcgen05CommitPair(SharedAddress(barrier), cta_mask);
}
MOK_DEVICE void Tcgen05Load16(uint32_t address, uint32_t (&r)[16]) {
  emulator::Tcgen05Load(address, r, 16);
}
template <int kRegisters>
MOK_DEVICE void Tcgen05WaitLoad(uint32_t (&)[kRegisters]) {
  emulator::Tcgen05WaitLoad();
  asm volatile("" ::: "memory");
}
MOK_DEVICE void Tcgen05FenceBefore() { emulator::Tcgen05Fence(false); }
MOK_DEVICE void Tcgen05FenceAfter() { emulator::Tcgen05Fence(true); }
MOK_DEVICE void TensorLoad2dPair(void* shared, const TensorMap* map, uint32_t barrier_address,
                                 int c0, int c1) {
  const int coordinates[2] = {c0, c1};
  emulator::TensorLoad(SharedAddress(shared), map, barrier_address, coordinates, 2, 0);
}

}  // namespace mok
