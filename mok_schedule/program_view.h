// The plain form of a task program: decodes task indices, on host and device, from a few sizes and
// the small piece tables. No list of tasks exists anywhere.
//
// The order of a pass (see task_program.h) is a list of segments in three parts:
//   prologue   run once: the entry barrier and the first work on the shared expert;
//   stream     repeated for every step. Each macrobatch has one step per minibatch; step j works on
//              several minibatches near j, each at another stage, so that no segment needs what
//              the segment right before it produces (see Span);
//   epilogue   run once: the rest of the shared expert, experts without rows, exit barrier,
//              reduction.
// A segment says which kind of task it holds, over what it runs (Span), how many tiles each element
// has and in which order they come. A queue is the same list without the segments that belong to
// other queues.
#pragma once

#include <cstdint>

#include "mok_core/macros.h"
#include "mok_schedule/program_shape.h"
#include "mok_schedule/ring_plan.h"
#include "mok_schedule/routing_table.h"
#include "mok_schedule/task.h"

namespace mok {

// What a segment runs over. Inside step j of a macrobatch of n minibatches the spans of the stream
// are row blocks of one of its minibatches, empty where it has no such minibatch: a pipeline that
// fills in its step 0 and drains in its step n - 1.
enum class Span : int32_t {
  // Of the stream, in every step.
  kBehind,     // minibatch j - 1
  kCurrent,    // minibatch j
  kNext,       // minibatch j + 1
  kAfterNext,  // minibatch j + 2
  kIncoming,   // minibatch j + kLeadMinibatches
  // Of the stream, in one step per macrobatch.
  kFirst,   // minibatch 0, in step 0
  kSecond,  // minibatch 1, in step 0
  kLast,    // minibatch n - 1, in step n - 1
  kLeadIn,  // minibatches 0 .. kLeadMinibatches - 1 of the macrobatch that runs next; those of the
            // first macrobatch precede the first step
  kPieces,  // pieces of the macrobatch, in step n - 1
  // Of the stream, in step 0 of the macrobatch that runs first.
  kAtStart,  // one element
  // Of the prologue and the epilogue.
  kOnce,          // one element
  kTokenBlocks,   // this rank's token blocks
  kEmptyExperts,  // experts without rows
  kWithoutRows,   // one element if there is no row block, else none
};
inline constexpr int kNumStreamSpans = 11;

// How many minibatches the exchange is ahead of the compute that drains the pipeline. Compute needs
// at least 3 (the backward recomputes two minibatches ahead).
inline constexpr int kLeadMinibatches = 3;

struct Segment {
  TaskKind kind;  // kWeightGradDown stands for its tiles followed by those of kWeightGradGateUp
  Span span;
  bool only_recomputed;  // empty for macrobatches that are kept
  uint32_t queues;       // bit q: the segment belongs to queue q
  int64_t tiles;         // per element of the span; 0 leaves the segment out
  int64_t panel_blocks;  // order of (block, tile): blocks in panels of this many, in each panel
                         // tiles outer and blocks inner; 1: blocks outer, tiles inner

  MOK_HOST_DEVICE bool IsIn(Queue queue) const { return queues >> static_cast<int>(queue) & 1; }
};

// What a counter counts; each family has one counter per `per`.
enum class CounterFamily : int32_t {
  kEntry,  // per pass: 1 when the entry barrier has been passed
  kExit,   // per pass: 1 when the exit barrier has been passed
  kSent,   // per pass: finished Combine or ReverseDispatch tasks
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
  // The same in two steps, the second of which several threads share: after this constructor,
  // CountTasks has to run for every queue before the view is used.
  struct Uncounted {};
  MOK_HOST_DEVICE ProgramView(Uncounted, const ProgramShape& shape, const RoutingTableView& table,
                              const PieceTables& pieces);
  MOK_HOST_DEVICE void CountTasks(Queue queue);

  MOK_HOST_DEVICE const ProgramShape& shape() const { return shape_; }
  MOK_HOST_DEVICE const RoutingTableView& table() const { return table_; }
  MOK_HOST_DEVICE const PieceTables& pieces() const { return pieces_; }
  // As those of shape().ring, without divisions.
  MOK_HOST_DEVICE int64_t num_macrobatches() const { return num_macrobatches_; }
  MOK_HOST_DEVICE int64_t SlotOfBlock(int64_t block, int64_t macrobatch) const {
    return block - macrobatch * shape_.ring.macrobatch_blocks;
  }
  MOK_HOST_DEVICE int64_t BlocksInSlot(int64_t slot) const {
    const int64_t last = num_macrobatches_ - 1;
    return slot < shape_.ring.blocks_in_macrobatch(last) ? num_macrobatches_ : last;
  }

  MOK_HOST_DEVICE int64_t NumTasks(Queue queue) const {
    return num_tasks_[static_cast<int>(queue)];
  }
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
  friend class ProgramCursor;
  static constexpr int kMaxSegments = 24;

  // One step of the stream. The lead-in of the first macrobatch is a step of no macrobatch.
  struct Step {
    int64_t macrobatch = -1;
    int64_t index = 0;                // j; counts inside the macrobatch
    bool is_last = false;             // of its macrobatch
    int64_t lead_in_macrobatch = -1;  // whose lead-in belongs to this step, or -1
  };
  struct Blocks {
    int64_t first = 0;
    int64_t count = 0;
  };

  MOK_HOST_DEVICE void Append(TaskKind kind, Span span, int64_t tiles, int64_t panel_blocks,
                              bool only_recomputed = false) {
    if (tiles == 0) return;
    uint32_t queues = 0;
    for (int queue = 0; queue < kNumQueues; ++queue) {
      if (IsInQueue(kind, static_cast<Queue>(queue))) queues |= 1u << queue;
    }
    segments_[num_segments_++] = {kind, span, only_recomputed, queues, tiles, panel_blocks};
  }
  MOK_HOST_DEVICE void ListForward();
  MOK_HOST_DEVICE void ListBackward();
  MOK_HOST_DEVICE void AppendReduction(TaskKind last_shared);
  MOK_HOST_DEVICE void LayOutCounters();

  MOK_HOST_DEVICE int64_t NumPieces(int64_t macrobatch) const {
    return pieces_.piece_begin[macrobatch + 1] - pieces_.piece_begin[macrobatch];
  }
  // Row blocks of a span of the stream, other than kPieces.
  MOK_HOST_DEVICE Blocks BlocksOf(Span span, const Step& step) const;
  // Elements of a segment; `first` matters for row blocks only, `step` for segments of the stream.
  MOK_HOST_DEVICE Blocks ElementsOf(const Segment& segment, const Step& step) const;
  MOK_HOST_DEVICE int64_t NumElements(const Segment& segment, const Step& step) const {
    return ElementsOf(segment, step).count;
  }
  // Whether elements are neither row blocks nor token blocks, and the tasks of such a segment.
  MOK_HOST_DEVICE static bool HasNoBlocks(Span span) {
    return span == Span::kOnce || span == Span::kPieces || span == Span::kEmptyExperts ||
           span == Span::kWithoutRows || span == Span::kAtStart;
  }
  // Whether a step is the first one of the pass that computes.
  MOK_HOST_DEVICE bool IsStart(const Step& step) const {
    return step.macrobatch >= 0 && step.index == 0 && step.macrobatch == MacrobatchAt(0);
  }
  MOK_HOST_DEVICE Task DecodeWithoutBlocks(const Segment& segment, const Step& step,
                                           int64_t index) const;
  MOK_HOST_DEVICE int64_t NumTasksOfSegments(Queue queue, int begin, int end) const;
  // Finds the task with `index` among those of segments begin .. end - 1.
  MOK_HOST_DEVICE Task DecodeSegments(Queue queue, int begin, int end, const Step& step,
                                      int64_t index) const;
  MOK_HOST_DEVICE Task DecodeElement(const Segment& segment, const Step& step, int64_t index) const;
  MOK_HOST_DEVICE Task BlockTask(TaskKind kind, int64_t block, int64_t tile) const;
  MOK_HOST_DEVICE Task WeightGradTask(int64_t macrobatch, int64_t piece, int64_t tile) const;

  // The macrobatch that runs at a position of the execution order; the map is its own inverse.
  MOK_HOST_DEVICE int64_t MacrobatchAt(int64_t position) const {
    return shape_.pass == Pass::kForward ? num_macrobatches_ - 1 - position : position;
  }
  MOK_HOST_DEVICE int64_t LeadInBlocks(int64_t macrobatch) const;
  // The step of a macrobatch of `num_steps` minibatches that holds the next one's lead-in: as early
  // as the slots have been read by earlier segments. In the forward every GateUp has run by the
  // step before the last; in the backward the weight gradients, in the last step, read them.
  MOK_HOST_DEVICE int64_t LeadInStep(int64_t num_steps) const {
    const int64_t early = num_steps < 2 ? 0 : num_steps - 2;
    return shape_.pass == Pass::kForward ? early : num_steps - 1;
  }
  // Tiles per element of each span, over the segments of the stream in a queue.
  MOK_HOST_DEVICE const int64_t* SpanTiles(Queue queue, bool recomputed) const {
    return span_tiles_[static_cast<int>(queue)][recomputed ? 1 : 0];
  }
  // Index, in the stream of a queue, of step 0 of the macrobatch at a position; at the number of
  // macrobatches it is the length of the stream.
  MOK_HOST_DEVICE int64_t StreamBegin(Queue queue, int64_t position) const;
  // Tasks of a macrobatch in the steps before `step`, but for the next macrobatch's lead-in.
  MOK_HOST_DEVICE int64_t StepBegin(const int64_t* tiles, int64_t macrobatch, int64_t step) const;
  // Finds the step that holds an index of the stream, and makes the index one inside the step.
  MOK_HOST_DEVICE Step FindStep(Queue queue, int64_t* index) const;

  ProgramShape shape_;
  int64_t num_macrobatches_ = 0;
  RoutingTableView table_ = {};
  PieceTables pieces_ = {};
  Segment segments_[kMaxSegments] = {};
  int num_segments_ = 0;
  int stream_begin_ = 0;    // segments before it are the prologue
  int epilogue_begin_ = 0;  // segments from it on are the epilogue
  // [queue][recomputed][span of the stream]; in [0] the segments of recomputed macrobatches are
  // left out.
  int64_t span_tiles_[kNumQueues][2][kNumStreamSpans] = {};
  // [queue] index of the first task of the stream, of the epilogue, and the number of tasks.
  int64_t stream_tasks_begin_[kNumQueues] = {};
  int64_t epilogue_tasks_begin_[kNumQueues] = {};
  int64_t num_tasks_[kNumQueues] = {};
  int32_t counter_begin_[kNumCounterFamilies + 1] = {};
};

}  // namespace mok

#include "mok_schedule/program_view_inl.h"
