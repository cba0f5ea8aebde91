// Tensor memory: ownership, pending writes, races. 128 lanes x 512 columns of 32 bits.
#pragma once

#include "mok_core/emulator/engine.h"

namespace mok::emulator {

constexpr int kTensorLanes = 128;
constexpr int kTensorColumns = 512;
constexpr int kQuadrants = 4;  // of 32 lanes; a warp accesses one

void EnsureTensorMemory(Block* block);
// Columns [column, column + count) are allocated.
void CheckTensorColumns(const Block* block, uint32_t column, int count, const char* what);
// One quadrant's part of a column.
void RecordTensorAccess(bool write, Block* block, int quadrant, int column, const Clock& clock,
                        Access access, const char* what);
void RecordTensorColumns(bool write, Block* block, uint32_t column, int count, const Clock& clock,
                         Access access, const char* what);
// tcgen05 instructions of a block take effect in order.
int TensorQueue(const Block* block);
// Fails unless the running thread has fenced since it last synchronised.
void CheckTensorFence(const char* what);

// A tcgen05 instruction on its way: its place in the block's order, and what its issuer knew.
struct TensorIssue {
  uint64_t sequence;
  Access access;
  std::shared_ptr<Clock> clock;
};
TensorIssue IssueTensorOperation(Block* block);

}  // namespace mok::emulator
