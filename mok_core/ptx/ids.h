// Thread, block and cluster coordinates, and addresses of shared memory.
#pragma once

#include "mok_core/ptx/compiler.h"

namespace mok {

// PTX ISA 8.8 section 10, %tid.
MOK_DEVICE Index3 ThreadIndex() { return {threadIdx.x, threadIdx.y, threadIdx.z}; }
// PTX ISA 8.8 section 10, %tid.x, read at every call: what is computed from it stays where it is
// written. The compiler moves what is computed from ThreadIndex() out of a persistent loop, into
// registers that accumulators need.
MOK_DEVICE uint32_t ThreadIndexReadHere() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}
// PTX ISA 8.8 section 10, %ctaid.
MOK_DEVICE Index3 BlockIndex() { return {blockIdx.x, blockIdx.y, blockIdx.z}; }
// PTX ISA 8.8 section 10, %ntid.
MOK_DEVICE Index3 BlockDimensions() { return {blockDim.x, blockDim.y, blockDim.z}; }
// PTX ISA 8.8 section 10, %nctaid.
MOK_DEVICE Index3 GridDimensions() { return {gridDim.x, gridDim.y, gridDim.z}; }

// PTX ISA 8.8 section 10, %cluster_ctarank.
MOK_DEVICE uint32_t ClusterRank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// PTX ISA 8.8 section 10, %cluster_nctarank.
MOK_DEVICE uint32_t ClusterSize() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// PTX ISA 8.8 section 10, %smid.
MOK_DEVICE uint32_t StreamingMultiprocessorId() {
  uint32_t id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

// PTX ISA 8.8 section 9.7.9, cvta.to.shared: the 32-bit shared::cluster address of this CTA's copy.
MOK_DEVICE uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// PTX ISA 8.8 section 9.7.9, mapa: the same variable in the CTA `rank` of the cluster.
MOK_DEVICE uint32_t MapToClusterRank(uint32_t shared_address, uint32_t rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared_address), "r"(rank));
  return mapped;
}

// PTX ISA 8.8 section 9.7.9, mapa on a generic address.
template <class T>
MOK_DEVICE T* MapPointerToClusterRank(T* pointer, uint32_t rank) {
  uint64_t mapped;
  asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(pointer), "r"(rank));
  return reinterpret_cast<T*>(mapped);
}

// The even CTA of a pair's copy: bit 24 of a shared::cluster address tells the two CTAs apart
// (PTX ISA 8.8 section 9.7.16, .cta_group::2).
MOK_DEVICE uint32_t PairLeaderAddress(const void* pointer) {
  return SharedAddress(pointer) & 0xFEFFFFFFu;
}

}  // namespace mok
