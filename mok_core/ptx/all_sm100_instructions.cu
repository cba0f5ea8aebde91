// Compiled, never run: ptxas accepts every sm_100a wrapper.
#include "mok_core/ptx/common_instructions.h"

namespace mok {
namespace {

MOK_DEVICE void UseTensorCore(InstructionStorage& s, const InstructionParams& p) {
  const uint32_t d = s.tensor_memory;
  Tcgen05MmaF16(d, p.doubles[0], p.doubles[1], 0, true);
  Tcgen05MmaMxf8(d, {p.doubles[0], p.doubles[1], d + 128, d + 136}, 0, true);
  Tcgen05CopyScales(d + 128, p.doubles[2]);
  Tcgen05Commit(&s.barrier);
  Tcgen05FenceBefore();
  Tcgen05FenceAfter();
  uint32_t values[16];
  Tcgen05Load16(d, values);
  Tcgen05WaitLoad(values);
  for (int i = 0; i < 16; ++i) p.words[i] = values[i];
}

}  // namespace

MOK_KERNEL(128, 1) AllSm100Instructions(MOK_GRID_CONSTANT(InstructionParams) p) {
  MOK_SHARED_STORAGE(InstructionStorage, s);
  UseCommonInstructions(p, s);
  ClusterLaunchTryCancel(&s.response, &s.barrier);
  Index3 block;
  if (ClusterLaunchQuery(&s.response, &block)) p.words[8] = block.x;
  TensorMemoryAllocate(&s.tensor_memory, 256);
  TensorMemoryRelinquish();
  UseTensorCore(s, p);
  TensorMemoryFree(s.tensor_memory, 256);
}

// One kernel allocates tensor memory for single blocks or for pairs, never both.
MOK_KERNEL(128, 1) AllSm100PairInstructions(MOK_GRID_CONSTANT(InstructionParams) p) {
  MOK_SHARED_STORAGE(InstructionStorage, s);
  TensorMemoryAllocatePair(&s.tensor_memory, 256);
  TensorMemoryRelinquishPair();
  Tcgen05MmaF16Pair(s.tensor_memory, p.doubles[0], p.doubles[1], 0, true);
  Tcgen05CommitPair(&s.barrier, 3);
  TensorLoad2dPair(s.tile, &p.map, PairLeaderAddress(&s.barrier), 0, 0);
  TensorMemoryFreePair(s.tensor_memory, 256);
}

}  // namespace mok
