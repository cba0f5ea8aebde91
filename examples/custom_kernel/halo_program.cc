#include "halo_program.h"

#include <algorithm>

#include "stencil.h"

namespace custom_kernel {

HaloLayout::HaloLayout(const HaloShape& shape, int ranks) {
  mok::HeapLayout heap;
  const size_t grid_bytes =
      static_cast<size_t>(shape.rows_per_rank * shape.columns) * sizeof(float);
  grids[0] = heap.Reserve(grid_bytes);
  grids[1] = heap.Reserve(grid_bytes);
  finished = heap.Reserve(static_cast<size_t>(shape.blocks()) * sizeof(mok::Counter));
  barrier = heap.Reserve(mok::RankBarrier::RegionBytes(ranks));
  bytes = heap.bytes();
}

HaloProgram::HaloProgram(const mok::SymmetricHeap& heap, const HaloShape& shape)
    : heap_(heap),
      shape_(shape),
      layout_(shape, heap.size()),
      barrier_(heap, layout_.barrier),
      tasks_(shape.steps * shape.blocks()) {}

mok::Status HaloProgram::Start(std::chrono::steady_clock::time_point deadline) {
  mok::WaitContext context;
  context.rank = heap_.rank();
  context.task = "Start";
  context.deadline = deadline;
  return barrier_.ArriveAndWait(context);
}

mok::Status HaloProgram::RunWorker(std::chrono::steady_clock::time_point deadline) {
  int64_t task = 0;
  while (tasks_.Next(task)) {
    const int64_t step = task / shape_.blocks();
    const int64_t block = task % shape_.blocks();
    mok::WaitContext context;
    context.rank = heap_.rank();
    context.task = "Update";
    context.task_index = task;
    context.deadline = deadline;
    for (int64_t neighbour = block - 1; neighbour <= block + 1; ++neighbour) {
      MOK_RETURN_IF_ERROR(WaitForBlock(neighbour, step, context));
    }
    Update(block, step);
    mok::Signal(Finished(heap_.rank(), block));
  }
  return mok::OkStatus();
}

mok::MatrixView<float> HaloProgram::Grid(int rank, int64_t step) const {
  std::byte* data = heap_.base(rank) + layout_.grids[step % 2];
  return mok::ContiguousMatrix(reinterpret_cast<float*>(data), shape_.rows_per_rank,
                               shape_.columns);
}

mok::Counter& HaloProgram::Finished(int rank, int64_t block) const {
  return reinterpret_cast<mok::Counter*>(heap_.base(rank) + layout_.finished)[block];
}

// Row `row` of this rank before `step`; row -1 and row rows_per_rank are the neighbours'.
const float* HaloProgram::RowOf(int64_t row, int64_t step) const {
  const int ranks = heap_.size();
  if (row < 0) return Grid((heap_.rank() + ranks - 1) % ranks, step).Row(shape_.rows_per_rank - 1);
  if (row == shape_.rows_per_rank) return Grid((heap_.rank() + 1) % ranks, step).Row(0);
  return Grid(heap_.rank(), step).Row(row);
}

// Block -1 and block blocks() are the neighbours' nearest ones.
mok::Status HaloProgram::WaitForBlock(int64_t block, int64_t step,
                                      const mok::WaitContext& context) const {
  const int ranks = heap_.size();
  int rank = heap_.rank();
  if (block < 0) {
    rank = (rank + ranks - 1) % ranks;
    block = shape_.blocks() - 1;
  } else if (block == shape_.blocks()) {
    rank = (rank + 1) % ranks;
    block = 0;
  }
  return mok::WaitAtLeast(Finished(rank, block), static_cast<uint64_t>(step), context);
}

void HaloProgram::Update(int64_t block, int64_t step) const {
  const mok::MatrixView<float> output = Grid(heap_.rank(), step + 1);
  const int64_t first = block * shape_.block_rows;
  const int64_t last = std::min(first + shape_.block_rows, shape_.rows_per_rank);
  for (int64_t row = first; row < last; ++row) {
    const StencilRows rows{RowOf(row - 1, step), RowOf(row, step), RowOf(row + 1, step),
                           shape_.columns};
    for (int64_t column = 0; column < shape_.columns; ++column) {
      output(row, column) = AverageAt(rows, column);
    }
  }
}

}  // namespace custom_kernel
