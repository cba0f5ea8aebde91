// The plain form of a task program: decodes task indices, on host and device, from a few sizes and
// the small piece tables. No list of tasks exists anywhere.
//
// The order of a pass (see task_program.h) is a list of segments in three parts:
//   prologue   run once: the entry barrier and the shared expert;
//   stream     repeated for every group. Group q holds the compute of minibatch q ("current") and
//              the transfers that bring minibatch q + 1 ("next") in and minibatch q out. Group -1
//              comes first and has only a next minibatch;
//   epilogue   run once: the shared weight gradients, experts without rows, exit barrier,
//   reduction.
// A segment says which kind of task it holds, over what it runs (Span) and how many tiles each
// element has. A queue is the same list without the segments that belong to the other queue.
#pragma once

#include <cstdint>

#include "mok_core/macros.h"
#include "mok_schedule/program_shape.h"
#include "mok_schedule/ring_plan.h"
#include "mok_schedule/routing_table.h"
#include "mok_schedule/task.h"

namespace mok {

// What a segment runs over.
enum class Span : int32_t {
  kOnce,               // one element
  kTokenBlocks,        // this rank's token blocks
  kEmptyExperts,       // experts without rows
  kCurrent,            // row blocks of the group's current minibatch
  kCurrentRecomputed,  // the same, where its macrobatch is recomputed
  kNext,               // row blocks of the group's next minibatch
  kNextRecomputed,     // the same, where its macrobatch is recomputed
  kPieces,             // pieces of the macrobatch that ends with the current minibatch
};
inline constexpr int kNumSpans = 8;

struct Segment {
  TaskKind kind;  // kWeightGradDown stands for its tiles followed by those of kWeightGradGateUp
  Span span;
  int64_t tiles;  // per element of the span; 0 leaves the segment out
};

// What a counter counts; each family has one counter per `per`.
enum class CounterFamily : int32_t {
  kEntry,          // per pass: 1 when the entry barrier has been passed
  kExit,           // per pass: 1 when the exit barrier has been passed
  kRowBlocksSent,  // per pass: finished Combine or ReverseDispatch tasks
  // Per ring slot, forward.
  kDispatched,
  kGateUpDone,
  kDownDone,
  kCombined,
  // Per ring slot, backward.
  kRecomputeDispatched,
  kRecomputeDone,
  kReverseCombined,
  kDownGradDone,
  kInputGradDone,
  kReverseDispatched,
  // Per token block, shared expert.
  kSharedGateUpDone,  // in the backward: recomputed
  kSharedDownDone,
  kSharedDownGradDone,
  kSharedInputGradDone,
  // Per local expert, backward.
  kWeightGradDone,
};
inline constexpr int kNumCounterFamilies = 18;

// "GateUpDone" for kGateUpDone; "Unknown" for a value that is no family.
const char* CounterFamilyName(CounterFamily family);

struct CounterName {
  CounterFamily family;
  int32_t index;  // slot, token block or local expert; 0 for a family with one counter
};

class ProgramView {
 public:
  ProgramView() = default;
  MOK_HOST_DEVICE ProgramView(const ProgramShape& shape, const RoutingTableView& table,
                              const PieceTables& pieces);

  MOK_HOST_DEVICE const ProgramShape& shape() const { return shape_; }
  MOK_HOST_DEVICE const RoutingTableView& table() const { return table_; }
  MOK_HOST_DEVICE const PieceTables& pieces() const { return pieces_; }

  MOK_HOST_DEVICE int64_t NumTasks(Queue queue) const;
  // 0 <= index < NumTasks(queue).
  MOK_HOST_DEVICE Task Decode(Queue queue, int64_t index) const;

  MOK_HOST_DEVICE int32_t NumCounters() const { return counter_begin_[kNumCounterFamilies]; }
  // `index`: slot, token block or local expert.
  MOK_HOST_DEVICE int32_t CounterOf(CounterFamily family, int64_t index) const {
    return counter_begin_[static_cast<int>(family)] + static_cast<int32_t>(index);
  }
  MOK_HOST_DEVICE CounterName NameOfCounter(int32_t counter) const;

  // The rows of a kWeightGradDown or kWeightGradGateUp task.
  MOK_HOST_DEVICE WeightGradPiece PieceOf(const Task& task) const;

 private:
  static constexpr int kMaxSegments = 16;

  // The minibatches a group of the stream works on; without one, its number of blocks is 0.
  struct Group {
    int64_t current_first = 0;
    int64_t current_blocks = 0;
    bool current_recomputed = false;
    int64_t next_first = 0;
    int64_t next_blocks = 0;
    bool next_recomputed = false;
    int64_t ended_macrobatch = -1;  // the macrobatch that the current minibatch ends, or -1
  };

  MOK_HOST_DEVICE void Append(TaskKind kind, Span span, int64_t tiles) {
    if (tiles > 0) segments_[num_segments_++] = {kind, span, tiles};
  }
  MOK_HOST_DEVICE void ListForward();
  MOK_HOST_DEVICE void ListBackward();
  MOK_HOST_DEVICE void LayOutCounters();

  MOK_HOST_DEVICE int64_t NumPieces(int64_t macrobatch) const {
    return pieces_.piece_begin[macrobatch + 1] - pieces_.piece_begin[macrobatch];
  }
  // Elements of a span; `group` matters to the spans of the stream only.
  MOK_HOST_DEVICE int64_t NumElements(Span span, const Group& group) const;
  MOK_HOST_DEVICE int64_t NumTasksOfSegments(Queue queue, int begin, int end,
                                             const Group& group) const;
  // Finds the task with `index` among those of segments begin .. end - 1.
  MOK_HOST_DEVICE Task DecodeSegments(Queue queue, int begin, int end, const Group& group,
                                      int64_t index) const;
  MOK_HOST_DEVICE Task DecodeElement(const Segment& segment, const Group& group,
                                     int64_t index) const;
  MOK_HOST_DEVICE Task BlockTask(TaskKind kind, int64_t block, int64_t tile) const;
  MOK_HOST_DEVICE Task WeightGradTask(int64_t macrobatch, int64_t piece, int64_t tile) const;

  // The macrobatch that runs at a position of the execution order; the map is its own inverse.
  MOK_HOST_DEVICE int64_t MacrobatchAt(int64_t position) const {
    return shape_.pass == Pass::kForward ? shape_.ring.num_macrobatches() - 1 - position : position;
  }
  // Index, in the stream of a queue, of the first task of the group whose current minibatch is the
  // first one of the macrobatch at a position. At position 0 it follows group -1; at the number of
  // macrobatches it is the length of the stream.
  MOK_HOST_DEVICE int64_t StreamBegin(Queue queue, int64_t position) const;
  MOK_HOST_DEVICE Group FindGroup(Queue queue, int64_t* index) const;

  ProgramShape shape_;
  RoutingTableView table_ = {};
  PieceTables pieces_ = {};
  Segment segments_[kMaxSegments] = {};
  int num_segments_ = 0;
  int stream_begin_ = 0;                            // segments before it are the prologue
  int epilogue_begin_ = 0;                          // segments from it on are the epilogue
  int64_t span_tiles_[kNumQueues][kNumSpans] = {};  // of the stream: tiles per element of a span
  int32_t counter_begin_[kNumCounterFamilies + 1] = {};
};

}  // namespace mok

#include "mok_schedule/program_view_inl.h"
