// What every task of a program reads and writes, as labelled cells: a model of the layer's buffers
// that knows nothing of counters.
//
// A cell is the part of a buffer that one task writes at once. Its label says whose data it holds:
// the row block for ring buffers, the macrobatch of the last piece for the carry buffer, 0 for
// buffers that are written once. A program is right if every task finds the labels it expects from
// its start to its end, whatever else runs at the same time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mok_schedule/task_program.h"

namespace mok::testing {

inline constexpr int64_t kNoData = -1;

enum class Buffer : int {
  kInputs,          // all peers' inputs: written by the entry barrier, read by every pull
  kSent,            // [row block, exchange tile] pushed rows, read by the exit barrier
  kOwnRows,         // [row block, hidden tile] rows that nobody pushes, since Down or InputGrad has
                    // stored them where the reduction reads them; likewise
  kLanded,          // all peers' pushes: written by the exit barrier, read by the reduction
  kX,               // [slot, exchange tile]
  kGateUp,          // [slot, intermediate tile] g and u, then d_gate and d_up in their place
  kHidden,          // [slot, intermediate tile]
  kY,               // [slot, hidden tile]
  kDOut,            // [slot, exchange tile] with the router weights of the rows
  kWeightedHidden,  // [slot, intermediate tile]
  kDRouter,         // [slot, intermediate tile] partial router gradients
  kDX,              // [slot of the window, hidden tile]
  kCarry,           // [weight gradient tile] fp32 partial sums of one expert
  kGradient,        // [expert, weight gradient tile]
  kSharedGateUp,    // [token block, shared tile]
  kSharedHidden,
  kSharedY,  // [token block, hidden tile]
  kSharedWeightedHidden,
  kSharedDX,        // [token block, hidden tile]
  kSharedGradient,  // [shared weight gradient tile]
  kOutput,          // [token block, reduce tile, or task of a fused reduction] out, or d_x
};
inline constexpr int kNumBuffers = 21;

struct Access {
  int32_t cell;
  int64_t label;
};

struct Effects {
  std::vector<Access> reads;
  std::vector<Access> writes;      // may include cells that the task reads as well
  std::vector<Access> late_reads;  // only once the late waits hold
};

class ProgramEffects {
 public:
  explicit ProgramEffects(const TaskProgram& program);

  int32_t num_cells() const { return begin_[kNumBuffers]; }
  // [num_cells] labels when the pass begins: the kept macrobatch, else kNoData.
  std::vector<int64_t> InitialLabels() const;
  Effects Of(const Task& task) const;
  // What must be there when the pass has ended: everything sent and written and, after a forward,
  // the saved activations of macrobatch 0 in the ring.
  std::vector<Access> FinalLabels() const;
  // "kGateUp(3, 0)"
  std::string CellName(int32_t cell) const;

 private:
  Access Cell(Buffer buffer, int64_t row, int64_t column, int64_t label) const;
  // All columns of rows first .. first + count - 1; the label of a ring cell is that of its block.
  void Append(std::vector<Access>& list, Buffer buffer, int64_t row, int64_t label) const;
  // One of the equal parts into which tiles of one size cut a row's cells.
  struct Part {
    int64_t row, index, parts;
  };
  void AppendPart(std::vector<Access>& list, Buffer buffer, const Part& part, int64_t label) const;
  void AddForward(const Task& task, Effects& effects) const;
  void AddBackward(const Task& task, Effects& effects) const;
  void AddWeightGrad(const Task& task, Effects& effects) const;
  void AddShared(const Task& task, Effects& effects) const;
  // rows: what it writes unless it writes the output.
  void AddLastShared(const Task& task, Buffer rows, Effects& effects) const;
  void AddPassWide(const Task& task, Effects& effects) const;

  const TaskProgram& program_;
  const ProgramShape& shape_;
  int64_t rows_[kNumBuffers];
  int64_t columns_[kNumBuffers];
  int32_t begin_[kNumBuffers + 1];
};

}  // namespace mok::testing
