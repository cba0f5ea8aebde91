// Inline definitions of program_view.h: the order of both passes and its decoding.
#pragma once

#include "mok_schedule/program_view.h"  // IWYU pragma: keep

namespace mok {

MOK_HOST_DEVICE inline ProgramView::ProgramView(const ProgramShape& shape,
                                                const RoutingTableView& table,
                                                const PieceTables& pieces)
    : shape_(shape), table_(table), pieces_(pieces) {
  if (shape_.pass == Pass::kForward) {
    ListForward();
  } else {
    ListBackward();
  }
  for (int i = stream_begin_; i < epilogue_begin_; ++i) {
    for (int queue = 0; queue < kNumQueues; ++queue) {
      if (!IsInQueue(segments_[i].kind, static_cast<Queue>(queue))) continue;
      span_tiles_[queue][static_cast<int>(segments_[i].span)] += segments_[i].tiles;
    }
  }
  LayOutCounters();
}

MOK_HOST_DEVICE inline void ProgramView::ListForward() {
  const int64_t shared_hidden_tiles = shape_.has_shared_expert() ? shape_.hidden_tiles : 0;
  Append(TaskKind::kEntryBarrier, Span::kOnce, 1);
  Append(TaskKind::kSharedGateUp, Span::kTokenBlocks, shape_.shared_intermediate_tiles);
  Append(TaskKind::kSharedDown, Span::kTokenBlocks, shared_hidden_tiles);
  stream_begin_ = num_segments_;
  Append(TaskKind::kGateUp, Span::kCurrent, shape_.intermediate_tiles);
  Append(TaskKind::kDown, Span::kCurrent, shape_.hidden_tiles);
  Append(TaskKind::kDispatch, Span::kNext, 1);
  Append(TaskKind::kCombine, Span::kCurrent, 1);
  epilogue_begin_ = num_segments_;
  Append(TaskKind::kExitBarrier, Span::kOnce, 1);
  Append(TaskKind::kTokenReduce, Span::kTokenBlocks, 1);
}

MOK_HOST_DEVICE inline void ProgramView::ListBackward() {
  const bool shared = shape_.has_shared_expert();
  const int64_t shared_tiles = shape_.shared_intermediate_tiles;
  Append(TaskKind::kEntryBarrier, Span::kOnce, 1);
  Append(TaskKind::kSharedRecomputeGateUp, Span::kTokenBlocks,
         shape_.is_shared_recomputed() ? shared_tiles : 0);
  Append(TaskKind::kSharedDownGrad, Span::kTokenBlocks, shared_tiles);
  Append(TaskKind::kSharedInputGrad, Span::kTokenBlocks, shared ? shape_.hidden_tiles : 0);
  stream_begin_ = num_segments_;
  Append(TaskKind::kRecomputeGateUp, Span::kCurrentRecomputed, shape_.intermediate_tiles);
  Append(TaskKind::kDownGrad, Span::kCurrent, shape_.intermediate_tiles);
  Append(TaskKind::kInputGrad, Span::kCurrent, shape_.hidden_tiles);
  Append(TaskKind::kWeightGradDown, Span::kPieces, shape_.weight_grad_tiles());
  Append(TaskKind::kRecomputeDispatch, Span::kNextRecomputed, 1);
  Append(TaskKind::kReverseCombine, Span::kNext, 1);
  Append(TaskKind::kReverseDispatch, Span::kCurrent, 1);
  epilogue_begin_ = num_segments_;
  Append(TaskKind::kSharedWeightGradDown, Span::kOnce, shape_.shared_weight_grad_down_tiles);
  Append(TaskKind::kSharedWeightGradGateUp, Span::kOnce, shape_.shared_weight_grad_gate_up_tiles);
  Append(TaskKind::kWeightGradDown, Span::kEmptyExperts, shape_.weight_grad_tiles());
  Append(TaskKind::kExitBarrier, Span::kOnce, 1);
  Append(TaskKind::kTokenReduce, Span::kTokenBlocks, 1);
}

MOK_HOST_DEVICE inline int64_t ProgramView::NumTasks(Queue queue) const {
  const Group none;
  return NumTasksOfSegments(queue, 0, stream_begin_, none) +
         StreamBegin(queue, shape_.ring.num_macrobatches()) +
         NumTasksOfSegments(queue, epilogue_begin_, num_segments_, none);
}

MOK_HOST_DEVICE inline Task ProgramView::Decode(Queue queue, int64_t index) const {
  const Group none;
  const int64_t prologue = NumTasksOfSegments(queue, 0, stream_begin_, none);
  if (index < prologue) return DecodeSegments(queue, 0, stream_begin_, none, index);
  index -= prologue;
  const int64_t stream = StreamBegin(queue, shape_.ring.num_macrobatches());
  if (index < stream) {
    const Group group = FindGroup(queue, &index);
    return DecodeSegments(queue, stream_begin_, epilogue_begin_, group, index);
  }
  return DecodeSegments(queue, epilogue_begin_, num_segments_, none, index - stream);
}

MOK_HOST_DEVICE inline int64_t ProgramView::NumElements(Span span, const Group& group) const {
  switch (span) {
    case Span::kOnce:
      return 1;
    case Span::kTokenBlocks:
      return shape_.token_blocks;
    case Span::kEmptyExperts:
      return NumPieces(shape_.ring.num_macrobatches());
    case Span::kCurrent:
      return group.current_blocks;
    case Span::kCurrentRecomputed:
      return group.current_recomputed ? group.current_blocks : 0;
    case Span::kNext:
      return group.next_blocks;
    case Span::kNextRecomputed:
      return group.next_recomputed ? group.next_blocks : 0;
    case Span::kPieces:
      return group.ended_macrobatch < 0 ? 0 : NumPieces(group.ended_macrobatch);
  }
  return 0;
}

MOK_HOST_DEVICE inline int64_t ProgramView::NumTasksOfSegments(Queue queue, int begin, int end,
                                                               const Group& group) const {
  int64_t count = 0;
  for (int i = begin; i < end; ++i) {
    if (!IsInQueue(segments_[i].kind, queue)) continue;
    count += segments_[i].tiles * NumElements(segments_[i].span, group);
  }
  return count;
}

MOK_HOST_DEVICE inline Task ProgramView::DecodeSegments(Queue queue, int begin, int end,
                                                        const Group& group, int64_t index) const {
  for (int i = begin; i < end; ++i) {
    if (!IsInQueue(segments_[i].kind, queue)) continue;
    const int64_t count = segments_[i].tiles * NumElements(segments_[i].span, group);
    if (index < count) return DecodeElement(segments_[i], group, index);
    index -= count;
  }
  return {TaskKind::kExitBarrier, -1, -1, -1, -1};  // unreachable for an index in range
}

MOK_HOST_DEVICE inline Task ProgramView::DecodeElement(const Segment& segment, const Group& group,
                                                       int64_t index) const {
  switch (segment.span) {
    case Span::kOnce:
      return {segment.kind, -1, static_cast<int32_t>(index), -1, -1};
    case Span::kTokenBlocks: {
      const int64_t panel_blocks = shape_.ring.minibatch_blocks;
      const int64_t first = index / (panel_blocks * segment.tiles) * panel_blocks;
      const int64_t rest = index - first * segment.tiles;
      const int64_t left = shape_.token_blocks - first;
      const int64_t blocks = left < panel_blocks ? left : panel_blocks;
      return {segment.kind, static_cast<int32_t>(first + rest % blocks),
              static_cast<int32_t>(rest / blocks), -1, -1};
    }
    case Span::kCurrent:
    case Span::kCurrentRecomputed:
      return BlockTask(segment.kind, group.current_first + index % group.current_blocks,
                       index / group.current_blocks);
    case Span::kNext:
    case Span::kNextRecomputed:
      return BlockTask(segment.kind, group.next_first + index % group.next_blocks,
                       index / group.next_blocks);
    case Span::kPieces:
      return WeightGradTask(group.ended_macrobatch, index / segment.tiles, index % segment.tiles);
    case Span::kEmptyExperts:
      break;
  }
  return WeightGradTask(-1, index / segment.tiles, index % segment.tiles);
}

MOK_HOST_DEVICE inline Task ProgramView::BlockTask(TaskKind kind, int64_t block,
                                                   int64_t tile) const {
  return {kind, static_cast<int32_t>(block), static_cast<int32_t>(tile),
          table_.expert_of_block(block),
          static_cast<int32_t>(shape_.ring.macrobatch_of_block(block))};
}

// Macrobatch -1 stands for the experts without rows.
MOK_HOST_DEVICE inline Task ProgramView::WeightGradTask(int64_t macrobatch, int64_t piece,
                                                        int64_t tile) const {
  const int64_t list = macrobatch < 0 ? shape_.ring.num_macrobatches() : macrobatch;
  const int32_t expert = pieces_.piece_expert[pieces_.piece_begin[list] + piece];
  const bool down = tile < shape_.weight_grad_down_tiles;
  return {down ? TaskKind::kWeightGradDown : TaskKind::kWeightGradGateUp, -1,
          static_cast<int32_t>(down ? tile : tile - shape_.weight_grad_down_tiles), expert,
          static_cast<int32_t>(macrobatch)};
}

MOK_HOST_DEVICE inline int64_t ProgramView::StreamBegin(Queue queue, int64_t position) const {
  const RingPlan& ring = shape_.ring;
  const int64_t num_macrobatches = ring.num_macrobatches();
  if (num_macrobatches == 0) return 0;
  // Row blocks that have been current, and that have been next, when the group begins.
  int64_t current = position * ring.macrobatch_blocks;
  if (position > 0 && (shape_.pass == Pass::kForward || position == num_macrobatches)) {
    // The one macrobatch that may be short, the last, has run.
    current -= ring.macrobatch_blocks - ring.blocks_in_macrobatch(num_macrobatches - 1);
  }
  int64_t next = current;
  if (position < num_macrobatches) next += ring.blocks_in_minibatch(MacrobatchAt(position), 0);
  // Those of them that are recomputed: all but the kept ones, which run first. (In the forward no
  // segment has a recomputed span.)
  const int64_t kept = shape_.kept_macrobatches * ring.macrobatch_blocks;
  const int64_t current_recomputed = current > kept ? current - kept : 0;
  const int64_t next_recomputed = next > kept ? next - kept : 0;
  const int64_t* tiles = span_tiles_[static_cast<int>(queue)];
  int64_t begin = tiles[static_cast<int>(Span::kCurrent)] * current +
                  tiles[static_cast<int>(Span::kCurrentRecomputed)] * current_recomputed +
                  tiles[static_cast<int>(Span::kNext)] * next +
                  tiles[static_cast<int>(Span::kNextRecomputed)] * next_recomputed;
  if (shape_.pass == Pass::kBackward) {
    begin += tiles[static_cast<int>(Span::kPieces)] * pieces_.piece_begin[position];
  }
  return begin;
}

// Replaces the index in the stream by the index in the group. All groups of a macrobatch but the
// last two have the same number of tasks, so after the macrobatch only a division is left.
MOK_HOST_DEVICE inline ProgramView::Group ProgramView::FindGroup(Queue queue,
                                                                 int64_t* index) const {
  const RingPlan& ring = shape_.ring;
  const int64_t num_macrobatches = ring.num_macrobatches();
  Group group;
  int64_t next_macrobatch = MacrobatchAt(0);
  int64_t next_minibatch = 0;
  if (*index >= StreamBegin(queue, 0)) {
    int64_t position = 0;
    for (int64_t end = num_macrobatches; end - position > 1;) {
      const int64_t middle = (position + end) / 2;
      if (*index < StreamBegin(queue, middle)) {
        end = middle;
      } else {
        position = middle;
      }
    }
    *index -= StreamBegin(queue, position);

    const int64_t macrobatch = MacrobatchAt(position);
    const bool recomputed = shape_.is_recomputed(macrobatch);
    const int64_t* tiles = span_tiles_[static_cast<int>(queue)];
    const int64_t current_tiles =
        tiles[static_cast<int>(Span::kCurrent)] +
        (recomputed ? tiles[static_cast<int>(Span::kCurrentRecomputed)] : 0);
    const int64_t next_tiles = tiles[static_cast<int>(Span::kNext)] +
                               (recomputed ? tiles[static_cast<int>(Span::kNextRecomputed)] : 0);
    const int64_t last = ring.minibatches_in_macrobatch(macrobatch) - 1;
    const int64_t group_tasks = ring.minibatch_blocks * (current_tiles + next_tiles);
    // Before the last group, all minibatches but the last were current, all but the first next.
    const int64_t last_begin =
        last * ring.minibatch_blocks * current_tiles +
        (ring.blocks_in_macrobatch(macrobatch) - ring.blocks_in_minibatch(macrobatch, 0)) *
            next_tiles;
    const bool in_last = *index >= last_begin;
    const int64_t minibatch = in_last ? last : *index / group_tasks;
    *index -= in_last ? last_begin : minibatch * group_tasks;

    group.current_first = ring.first_block_of_minibatch(macrobatch, minibatch);
    group.current_blocks = ring.blocks_in_minibatch(macrobatch, minibatch);
    group.current_recomputed = recomputed;
    if (in_last) group.ended_macrobatch = macrobatch;
    next_macrobatch = macrobatch;
    next_minibatch = minibatch + 1;
    if (in_last) {
      if (position + 1 == num_macrobatches) return group;
      next_macrobatch = MacrobatchAt(position + 1);
      next_minibatch = 0;
    }
  }
  group.next_first = ring.first_block_of_minibatch(next_macrobatch, next_minibatch);
  group.next_blocks = ring.blocks_in_minibatch(next_macrobatch, next_minibatch);
  group.next_recomputed = shape_.is_recomputed(next_macrobatch);
  return group;
}

MOK_HOST_DEVICE inline WeightGradPiece ProgramView::PieceOf(const Task& task) const {
  if (task.macrobatch < 0) return {0, 0, 0, false, false};
  const RingPlan& ring = shape_.ring;
  const int64_t expert_begin = table_.expert_block_begin[task.expert];
  const int64_t expert_end = table_.expert_block_begin[task.expert + 1];
  const int64_t window_begin = ring.first_block_of_macrobatch(task.macrobatch);
  const int64_t window_end = window_begin + ring.blocks_in_macrobatch(task.macrobatch);
  const int64_t begin = expert_begin > window_begin ? expert_begin : window_begin;
  const int64_t end = expert_end < window_end ? expert_end : window_end;
  const int64_t num_rows = (end - begin - 1) * kRowBlock + table_.rows_in_block(end - 1);
  return {begin, end - begin, num_rows, expert_begin<window_begin, expert_end> window_end};
}

MOK_HOST_DEVICE inline void ProgramView::LayOutCounters() {
  const bool forward = shape_.pass == Pass::kForward;
  const int64_t slots = shape_.ring.num_slots();
  const int64_t token_blocks = shape_.has_shared_expert() ? shape_.token_blocks : 0;
  int64_t begin = 0;
  for (int i = 0; i < kNumCounterFamilies; ++i) {
    const auto family = static_cast<CounterFamily>(i);
    counter_begin_[i] = static_cast<int32_t>(begin);
    if (family <= CounterFamily::kRowBlocksSent) {
      begin += 1;
    } else if (family <= CounterFamily::kCombined) {
      begin += forward ? slots : 0;
    } else if (family <= CounterFamily::kReverseDispatched) {
      begin += forward ? 0 : slots;
    } else if (family <= CounterFamily::kSharedInputGradDone) {
      begin += token_blocks;
    } else {
      begin += forward ? 0 : table_.num_local_experts;
    }
  }
  counter_begin_[kNumCounterFamilies] = static_cast<int32_t>(begin);
}

MOK_HOST_DEVICE inline CounterName ProgramView::NameOfCounter(int32_t counter) const {
  int family = 0;
  while (counter >= counter_begin_[family + 1]) ++family;
  return {static_cast<CounterFamily>(family), counter - counter_begin_[family]};
}

}  // namespace mok
