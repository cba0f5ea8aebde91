#include "mok_core/device/device.h"
#include "mok_megakernel/cuda/stage_rows.h"

namespace mok {
namespace {

MOK_KERNEL(kStageRowsThreads, 1)
StageRowsKernel(MOK_GRID_CONSTANT(StageRowsParams) p) {
  // Loads in flight per thread: enough to cover the latency of memory at four blocks per SM.
  constexpr int kUnroll = 4;
  const StageRowsParams::Copy& copy = p.copies[BlockIndex().y];
  const auto* source = static_cast<const Word4*>(copy.source);
  auto* destination = static_cast<Word4*>(copy.destination);
  const int64_t count = copy.bytes / static_cast<int64_t>(sizeof(Word4));
  const int64_t step = int64_t{GridDimensions().x} * kStageRowsThreads;
  const int64_t first = int64_t{BlockIndex().x} * kStageRowsThreads + ThreadIndex().x;
  int64_t i = first;
  for (; i + (kUnroll - 1) * step < count; i += kUnroll * step) {
    Word4 words[kUnroll];
    MOK_UNROLL
    for (int j = 0; j < kUnroll; ++j) words[j] = source[i + j * step];
    MOK_UNROLL
    for (int j = 0; j < kUnroll; ++j) destination[i + j * step] = words[j];
  }
  for (; i < count; i += step) destination[i] = source[i];
  // The rest of less than one vector: fp32 scalars.
  const int64_t scalars = copy.bytes / 4, last = count * 4 + first;
  if (last < scalars) {
    static_cast<uint32_t*>(copy.destination)[last] =
        static_cast<const uint32_t*>(copy.source)[last];
  }
}

}  // namespace

const void* StageRowsKernelAddress() { return reinterpret_cast<const void*>(&StageRowsKernel); }

}  // namespace mok
