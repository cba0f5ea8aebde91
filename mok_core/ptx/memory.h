// Loads, stores and reductions of global memory whose names carry order and scope
// (PTX ISA 8.8 sections 8 and 9.7.9: ld, st; 9.7.13: atom, red).
//
// Gpu scope orders with threads of the same GPU, Sys with other GPUs and the host as well. Flags
// that a peer GPU reads or writes need Sys on both sides. Host memory is for loads and stores only:
// PCIe has no atomics that would make a red or atom on it one.
#pragma once

#include "mok_core/ptx/compiler.h"

namespace mok {

// ld.acquire.gpu.
MOK_DEVICE uint32_t LoadAcquireGpu(const uint32_t* global) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(global) : "memory");
  return value;
}

// ld.acquire.gpu.
MOK_DEVICE uint64_t LoadAcquireGpu(const uint64_t* global) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(global) : "memory");
  return value;
}

// ld.acquire.sys.
MOK_DEVICE uint32_t LoadAcquireSys(const uint32_t* global) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(global) : "memory");
  return value;
}

// ld.acquire.sys.
MOK_DEVICE uint64_t LoadAcquireSys(const uint64_t* global) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(global) : "memory");
  return value;
}

// ld.relaxed.gpu.
MOK_DEVICE uint32_t LoadRelaxedGpu(const uint32_t* global) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(global) : "memory");
  return value;
}

// ld.relaxed.gpu.
MOK_DEVICE uint64_t LoadRelaxedGpu(const uint64_t* global) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(global) : "memory");
  return value;
}

// ld.relaxed.sys.
MOK_DEVICE uint32_t LoadRelaxedSys(const uint32_t* global) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(global) : "memory");
  return value;
}

// ld.relaxed.sys.
MOK_DEVICE uint64_t LoadRelaxedSys(const uint64_t* global) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(global) : "memory");
  return value;
}

// st.release.gpu.
MOK_DEVICE void StoreReleaseGpu(uint32_t* global, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

// st.release.gpu.
MOK_DEVICE void StoreReleaseGpu(uint64_t* global, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(global), "l"(value) : "memory");
}

// st.release.sys.
MOK_DEVICE void StoreReleaseSys(uint32_t* global, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

// st.release.sys.
MOK_DEVICE void StoreReleaseSys(uint64_t* global, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(global), "l"(value) : "memory");
}

// st.relaxed.gpu.
MOK_DEVICE void StoreRelaxedGpu(uint32_t* global, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

// st.relaxed.gpu.
MOK_DEVICE void StoreRelaxedGpu(uint64_t* global, uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(global), "l"(value) : "memory");
}

// st.relaxed.sys.
MOK_DEVICE void StoreRelaxedSys(uint32_t* global, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

// st.relaxed.sys.
MOK_DEVICE void StoreRelaxedSys(uint64_t* global, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(global), "l"(value) : "memory");
}

// red.release.gpu.add.
MOK_DEVICE void ReduceAddReleaseGpu(uint32_t* global, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

// red.release.gpu.add.
MOK_DEVICE void ReduceAddReleaseGpu(uint64_t* global, uint64_t value) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(global), "l"(value) : "memory");
}

// red.release.sys.add.
MOK_DEVICE void ReduceAddReleaseSys(uint32_t* global, uint32_t value) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

// red.release.sys.add.
MOK_DEVICE void ReduceAddReleaseSys(uint64_t* global, uint64_t value) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(global), "l"(value) : "memory");
}

// red.relaxed.gpu.add.
MOK_DEVICE void ReduceAddRelaxedGpu(uint32_t* global, uint32_t value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

// red.relaxed.gpu.add.
MOK_DEVICE void ReduceAddRelaxedGpu(uint64_t* global, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(global), "l"(value) : "memory");
}

// red.relaxed.sys.add.
MOK_DEVICE void ReduceAddRelaxedSys(uint32_t* global, uint32_t value) {
  asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

// red.relaxed.sys.add.
MOK_DEVICE void ReduceAddRelaxedSys(uint64_t* global, uint64_t value) {
  asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(global), "l"(value) : "memory");
}

// atom.relaxed.gpu.add; returns the value before.
MOK_DEVICE uint32_t AtomicAddRelaxedGpu(uint32_t* global, uint32_t value) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(global), "r"(value)
               : "memory");
  return before;
}

// atom.relaxed.gpu.add; returns the value before.
MOK_DEVICE uint64_t AtomicAddRelaxedGpu(uint64_t* global, uint64_t value) {
  uint64_t before;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(global), "l"(value)
               : "memory");
  return before;
}

// atom.acq_rel.gpu.add; returns the value before.
MOK_DEVICE uint32_t AtomicAddAcquireReleaseGpu(uint32_t* global, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(global), "r"(value)
               : "memory");
  return before;
}

// atom.acq_rel.gpu.add; returns the value before.
MOK_DEVICE uint64_t AtomicAddAcquireReleaseGpu(uint64_t* global, uint64_t value) {
  uint64_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(global), "l"(value)
               : "memory");
  return before;
}

// atom.acq_rel.sys.add; returns the value before.
MOK_DEVICE uint32_t AtomicAddAcquireReleaseSys(uint32_t* global, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.sys.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(global), "r"(value)
               : "memory");
  return before;
}

// atom.acq_rel.sys.add; returns the value before.
MOK_DEVICE uint64_t AtomicAddAcquireReleaseSys(uint64_t* global, uint64_t value) {
  uint64_t before;
  asm volatile("atom.acq_rel.sys.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(global), "l"(value)
               : "memory");
  return before;
}

// atom.acq_rel.gpu.cas; returns the value before.
MOK_DEVICE uint32_t AtomicCompareSwapAcquireReleaseGpu(uint32_t* global, uint32_t expected,
                                                       uint32_t desired) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(before)
               : "l"(global), "r"(expected), "r"(desired)
               : "memory");
  return before;
}

// atom.acq_rel.sys.cas; returns the value before.
MOK_DEVICE uint32_t AtomicCompareSwapAcquireReleaseSys(uint32_t* global, uint32_t expected,
                                                       uint32_t desired) {
  uint32_t before;
  asm volatile("atom.acq_rel.sys.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(before)
               : "l"(global), "r"(expected), "r"(desired)
               : "memory");
  return before;
}

// ld.global.nc: memory that nothing writes while the kernel runs.
MOK_DEVICE uint32_t LoadNonCoherent(const uint32_t* global) {
  uint32_t value;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(value) : "l"(global));
  return value;
}

// ld.global.nc.
MOK_DEVICE int32_t LoadNonCoherent(const int32_t* global) {
  int32_t value;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(value) : "l"(global));
  return value;
}

// ld.global.nc.
MOK_DEVICE float LoadNonCoherent(const float* global) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(global));
  return value;
}

// ld.global.nc.v4 of 16 aligned bytes; not kept in L1.
MOK_DEVICE Word4 LoadNonCoherent(const Word4* global) {
  Word4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(global));
  return value;
}

// ld.global.v4 of 16 aligned bytes.
MOK_DEVICE Word4 LoadVector(const Word4* global) {
  Word4 value;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(global)
               : "memory");
  return value;
}

// ld.global.v4 of four aligned floats if `condition`, else nothing: a load without a branch, for
// registers that a wgmma accumulates into (ptxas serialises multiplies whose accumulators come
// from different paths).
MOK_DEVICE void LoadVectorIf(bool condition, const Word4* global, float (&values)[4]) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "@p ld.global.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "+f"(values[0]), "+f"(values[1]), "+f"(values[2]), "+f"(values[3])
      : "l"(global), "r"(static_cast<int>(condition))
      : "memory");
}

// ld.global.v2 of 8 aligned bytes.
MOK_DEVICE Word2 LoadVector(const Word2* global) {
  Word2 value;
  asm volatile("ld.global.v2.b32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "l"(global)
               : "memory");
  return value;
}

// ld.global.cs.v4: read once, likely not again.
MOK_DEVICE Word4 LoadVectorStreaming(const Word4* global) {
  Word4 value;
  asm volatile("ld.global.cs.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(global)
               : "memory");
  return value;
}

// st.global.cs.v2 of 8 aligned bytes: written once, likely not read again soon.
MOK_DEVICE void StoreVectorStreaming(Word2* global, Word2 value) {
  asm volatile("st.global.cs.v2.b32 [%0], {%1, %2};" ::"l"(global), "r"(value.x), "r"(value.y)
               : "memory");
}

// st.global.v4 of 16 aligned bytes.
MOK_DEVICE void StoreVector(Word4* global, Word4 value) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

// st.global.cs.v4: written once, likely not read again soon.
MOK_DEVICE void StoreVectorStreaming(Word4* global, Word4 value) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

}  // namespace mok
