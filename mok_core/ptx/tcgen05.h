// Fifth-generation tensor core (PTX ISA 8.8 section 9.7.16, tcgen05). sm_100a and sm_103a.
//
// Tensor-memory addresses: lane in bits 16 to 31, column in bits 0 to 15. "Pair" functions are the
// .cta_group::2 forms: two CTAs of a cluster work as one and the even one issues.
#pragma once

#include "mok_core/ptx/compiler.h"
#include "mok_core/ptx/ids.h"

namespace mok {

// tcgen05.alloc by one warp: `columns` is a power of two from 32 to 512; the address of the first
// column is written to shared memory.
MOK_DEVICE void TensorMemoryAllocate(uint32_t* shared_result, uint32_t columns) {
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(
                   SharedAddress(shared_result)),
               "r"(columns)
               : "memory");
}

// tcgen05.dealloc by one warp, required before the CTA exits.
MOK_DEVICE void TensorMemoryFree(uint32_t address, uint32_t columns) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns)
               : "memory");
}

// tcgen05.relinquish_alloc_permit: this CTA allocates no more.
MOK_DEVICE void TensorMemoryRelinquish() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}

// tcgen05.alloc.cta_group::2, by one warp of each CTA of the pair.
MOK_DEVICE void TensorMemoryAllocatePair(uint32_t* shared_result, uint32_t columns) {
  asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(
                   SharedAddress(shared_result)),
               "r"(columns)
               : "memory");
}

// tcgen05.dealloc.cta_group::2, by one warp of each CTA of the pair.
MOK_DEVICE void TensorMemoryFreePair(uint32_t address, uint32_t columns) {
  asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns)
               : "memory");
}

// tcgen05.relinquish_alloc_permit.cta_group::2.
MOK_DEVICE void TensorMemoryRelinquishPair() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::: "memory");
}

// tcgen05.mma kind::f16, operands in shared memory, by one thread: D = A B + (accumulate ? D : 0).
MOK_DEVICE void Tcgen05MmaF16(uint32_t d, uint64_t descriptor_a, uint64_t descriptor_b,
                              uint32_t instruction, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n"
      "}" ::"r"(d),
      "l"(descriptor_a), "l"(descriptor_b), "r"(instruction), "r"(static_cast<uint32_t>(accumulate))
      : "memory");
}

// tcgen05.mma.cta_group::2 kind::f16: M = 256 over the pair.
MOK_DEVICE void Tcgen05MmaF16Pair(uint32_t d, uint64_t descriptor_a, uint64_t descriptor_b,
                                  uint32_t instruction, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p;\n"
      "}" ::"r"(d),
      "l"(descriptor_a), "l"(descriptor_b), "r"(instruction), "r"(static_cast<uint32_t>(accumulate))
      : "memory");
}

// tcgen05.mma kind::mxf8f6f4.block_scale: one E8M0 scale per 32 elements of K.
MOK_DEVICE void Tcgen05MmaMxf8(uint32_t d, const BlockScaledOperands& operands,
                               uint32_t instruction, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%0], %1, %2, %3, [%5], [%6], p;\n"
      "}" ::"r"(d),
      "l"(operands.descriptor_a), "l"(operands.descriptor_b), "r"(instruction),
      "r"(static_cast<uint32_t>(accumulate)), "r"(operands.scales_a), "r"(operands.scales_b)
      : "memory");
}

// tcgen05.cp.32x128b.warpx4: 512 bytes of scales from shared memory to 4 columns, replicated to all
// four lane quadrants. Executes in order with the multiplies that the same thread issues.
MOK_DEVICE void Tcgen05CopyScales(uint32_t destination, uint64_t descriptor) {
  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(destination),
               "l"(descriptor)
               : "memory");
}

// tcgen05.commit: the barrier gets one arrival when all earlier tcgen05 work of this thread is
// done.
MOK_DEVICE void Tcgen05Commit(uint64_t* barrier) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                   SharedAddress(barrier))
               : "memory");
}

// tcgen05.commit.cta_group::2 to the barriers at the same offset in the CTAs of `cta_mask`.
MOK_DEVICE void Tcgen05CommitPair(uint64_t* barrier, uint16_t cta_mask) {
  asm volatile(
      "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
      " [%0], %1;" ::"r"(SharedAddress(barrier)),
      "h"(cta_mask)
      : "memory");
}

// tcgen05.ld.32x32b.x16: 16 columns of this warp's 32 lanes; usable after Tcgen05WaitLoad.
MOK_DEVICE void Tcgen05Load16(uint32_t address, uint32_t (&r)[16]) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15}, [%16];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]),
        "=r"(r[7]), "=r"(r[8]), "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]),
        "=r"(r[14]), "=r"(r[15])
      : "r"(address)
      : "memory");
}

// tcgen05.wait::ld. The registers pass through it, so that no use is scheduled above the wait.
template <int kRegisters>
MOK_DEVICE void Tcgen05WaitLoad(uint32_t (&registers)[kRegisters]) {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
  MOK_UNROLL
  for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// tcgen05.fence::before_thread_sync: before the barrier that hands tensor memory to other threads.
MOK_DEVICE void Tcgen05FenceBefore() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

// tcgen05.fence::after_thread_sync: after the barrier, before the first tcgen05 instruction.
MOK_DEVICE void Tcgen05FenceAfter() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// cp.async.bulk.tensor.2d.cta_group::2 (section 9.7.9): as TensorLoad2d, but the barrier, given by
// address, may be that of either CTA of the pair (see PairLeaderAddress).
MOK_DEVICE void TensorLoad2dPair(void* shared, const TensorMap* map, uint32_t barrier_address,
                                 int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.tile"
      ".mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(barrier_address), "r"(c0), "r"(c1)
      : "memory");
}

}  // namespace mok
