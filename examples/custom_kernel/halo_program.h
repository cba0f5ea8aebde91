// A grid split by rows over ranks and updated many times in one persistent program, built from
// MoK's parts: a symmetric heap for the grid, counters instead of a barrier per step, a work source
// that hands out the tasks.
//
// Task t of a rank updates row block t % blocks in step t / blocks. It waits until the block and
// its two neighbours, which may lie on other ranks, have finished the steps before. That also
// protects the buffer it overwrites: those who read it have finished. Tasks wait only on earlier
// steps, so one worker per rank is enough to make progress.
#pragma once

#include <chrono>
#include <cstdint>

#include "mok_comm/rank_barrier.h"
#include "mok_comm/symmetric_heap.h"
#include "mok_core/counter.h"
#include "mok_core/status.h"
#include "mok_core/view.h"
#include "mok_core/work_source.h"

namespace custom_kernel {

struct HaloShape {
  int64_t rows_per_rank = 0;  // > 0
  int64_t columns = 0;        // > 0
  int64_t block_rows = 1;     // > 0; the last block of a rank may be shorter
  int64_t steps = 0;

  int64_t blocks() const { return (rows_per_rank + block_rows - 1) / block_rows; }
};

// Where things lie in every rank's heap.
struct HaloLayout {
  size_t grids[2];  // [rows_per_rank, columns] fp32: step s reads s % 2 and writes the other
  size_t finished;  // [blocks] counters: steps that the block has finished
  size_t barrier;   // of all ranks, before the first step
  size_t bytes;

  HaloLayout(const HaloShape& shape, int ranks);
};

// One rank's part. Workers of the rank call RunWorker; any number of threads, at least one.
class HaloProgram {
 public:
  // The heap (HaloLayout::bytes, zeroed) outlives the program.
  HaloProgram(const mok::SymmetricHeap& heap, const HaloShape& shape);

  // This rank's rows, to fill before Start and to read after all workers of all ranks are done.
  mok::MatrixView<float> Input() { return Grid(heap_.rank(), 0); }
  mok::MatrixView<float> Output() { return Grid(heap_.rank(), shape_.steps); }

  // Once per rank, before its workers: waits until every rank has filled its input.
  mok::Status Start(std::chrono::steady_clock::time_point deadline);

  // Executes tasks until none is left.
  mok::Status RunWorker(std::chrono::steady_clock::time_point deadline);

 private:
  mok::MatrixView<float> Grid(int rank, int64_t step) const;
  mok::Counter& Finished(int rank, int64_t block) const;
  const float* RowOf(int64_t row, int64_t step) const;
  mok::Status WaitForBlock(int64_t block, int64_t step, const mok::WaitContext& context) const;
  void Update(int64_t block, int64_t step) const;

  const mok::SymmetricHeap& heap_;
  const HaloShape shape_;
  const HaloLayout layout_;
  mok::RankBarrier barrier_;
  mok::ThreadWorkSource tasks_;
};

}  // namespace custom_kernel
