// Twin of mok_core/ptx/ids.h.
#pragma once

#include "mok_core/emulator/twins/compiler.h"

namespace mok {

MOK_DEVICE Index3 ThreadIndex() { return emulator::CurrentThread()->thread; }
MOK_DEVICE uint32_t ThreadIndexReadHere() { return ThreadIndex().x; }
MOK_DEVICE Index3 BlockIndex() { return emulator::CurrentThread()->block; }
MOK_DEVICE Index3 BlockDimensions() { return emulator::CurrentThread()->block_dimensions; }
MOK_DEVICE Index3 GridDimensions() { return emulator::CurrentThread()->grid_dimensions; }
MOK_DEVICE uint32_t ClusterRank() { return emulator::CurrentThread()->cluster_rank; }
MOK_DEVICE uint32_t ClusterSize() { return emulator::CurrentThread()->cluster_size; }
MOK_DEVICE uint32_t StreamingMultiprocessorId() { return emulator::CurrentThread()->processor; }
MOK_DEVICE uint32_t SharedAddress(const void* pointer) { return emulator::SharedAddress(pointer); }
MOK_DEVICE uint32_t MapToClusterRank(uint32_t shared_address, uint32_t rank) {
  return emulator::MapToClusterRank(shared_address, rank);
}
template <class T>
MOK_DEVICE T* MapPointerToClusterRank(T* pointer, uint32_t rank) {
  const uint32_t address = emulator::MapToClusterRank(emulator::SharedAddress(pointer), rank);
  return static_cast<T*>(emulator::SharedPointer(address));
}
MOK_DEVICE uint32_t PairLeaderAddress(const void* pointer) {
  return SharedAddress(pointer) & 0xFEFFFFFFu;
}

}  // namespace mok
