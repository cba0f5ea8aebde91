// Compiled, never run: ptxas accepts every sm_90a wrapper.
#include "mok_core/ptx/common_instructions.h"

namespace mok {
namespace {

template <int kN, int kTransposeA, int kTransposeB>
MOK_DEVICE void UseWgmma(const InstructionParams& p) {
  float accumulator[kN / 2];
  WgmmaFence();
  WgmmaBf16<kN, kTransposeA, kTransposeB>(accumulator, p.doubles[0], p.doubles[1], false);
  WgmmaCommitGroup();
  WgmmaWaitGroup<0>(accumulator);
  for (int i = 0; i < kN / 2; ++i) p.floats[i * 128 + ThreadIndex().x] = accumulator[i];
}

}  // namespace

MOK_KERNEL(128, 1) AllSm90Instructions(MOK_GRID_CONSTANT(InstructionParams) p) {
  MOK_SHARED_STORAGE(InstructionStorage, s);
  UseCommonInstructions(p, s);
}

template <int kN>
MOK_KERNEL(128, 1)
AllWgmmas(MOK_GRID_CONSTANT(InstructionParams) p) {
  UseWgmma<kN, 0, 0>(p);
  UseWgmma<kN, 1, 0>(p);
  UseWgmma<kN, 0, 1>(p);
  UseWgmma<kN, 1, 1>(p);
}

template __global__ void AllWgmmas<32>(const __grid_constant__ InstructionParams);
template __global__ void AllWgmmas<64>(const __grid_constant__ InstructionParams);
template __global__ void AllWgmmas<96>(const __grid_constant__ InstructionParams);
template __global__ void AllWgmmas<128>(const __grid_constant__ InstructionParams);
template __global__ void AllWgmmas<192>(const __grid_constant__ InstructionParams);
template __global__ void AllWgmmas<256>(const __grid_constant__ InstructionParams);

}  // namespace mok
