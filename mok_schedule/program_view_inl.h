// Inline definitions of program_view.h: the order of both passes and its decoding.
#pragma once

#include "mok_schedule/program_view.h"  // IWYU pragma: keep

namespace mok {

MOK_HOST_DEVICE inline ProgramView::ProgramView(const ProgramShape& shape,
                                                const RoutingTableView& table,
                                                const PieceTables& pieces)
    : ProgramView(Uncounted(), shape, table, pieces) {
  MOK_NO_UNROLL
  for (int queue = 0; queue < kNumQueues; ++queue) CountTasks(static_cast<Queue>(queue));
}

MOK_HOST_DEVICE inline ProgramView::ProgramView(Uncounted, const ProgramShape& shape,
                                                const RoutingTableView& table,
                                                const PieceTables& pieces)
    : shape_(shape),
      num_macrobatches_(shape.ring.num_macrobatches()),
      table_(table),
      pieces_(pieces) {
  if (shape_.pass == Pass::kForward) {
    ListForward();
  } else {
    ListBackward();
  }
  LayOutCounters();
}

MOK_HOST_DEVICE inline void ProgramView::ListForward() {
  const int64_t shared_hidden_tiles = shape_.has_shared_expert() ? shape_.hidden_tiles : 0;
  const int64_t minibatch = shape_.ring.minibatch_blocks;
  const int64_t output_panel =
      shape_.output_panel_blocks > 0 ? shape_.output_panel_blocks : minibatch;
  const int64_t gate_up_panel =
      shape_.gate_up_panel_blocks > 0 ? shape_.gate_up_panel_blocks : minibatch;
  Append(TaskKind::kEntryBarrier, Span::kOnce, 1, 1);
  Append(TaskKind::kSharedGateUp, Span::kTokenBlocks, shape_.shared_intermediate_tiles, minibatch);
  stream_begin_ = num_segments_;
  Append(TaskKind::kGateUp, Span::kFirst, shape_.intermediate_tiles, gate_up_panel);
  Append(TaskKind::kGateUp, Span::kNext, shape_.intermediate_tiles, gate_up_panel);
  Append(TaskKind::kDispatch, Span::kIncoming, shape_.exchange_tiles, 1);
  Append(TaskKind::kDispatch, Span::kLeadIn, shape_.exchange_tiles, 1);
  Append(TaskKind::kCombine, Span::kBehind, shape_.exchange_tiles, 1);
  Append(TaskKind::kDown, Span::kCurrent, shape_.hidden_tiles, output_panel);
  Append(TaskKind::kCombine, Span::kLast, shape_.exchange_tiles, 1);
  epilogue_begin_ = num_segments_;
  if (!shape_.fuses_token_reduce()) {
    Append(TaskKind::kSharedDown, Span::kTokenBlocks, shared_hidden_tiles, output_panel);
  }
  AppendReduction(TaskKind::kSharedDown);
}

// `last_shared` has been appended, unless it is to do TokenReduce's work.
MOK_HOST_DEVICE inline void ProgramView::AppendReduction(TaskKind last_shared) {
  const bool is_fused = shape_.fuses_token_reduce();
  Append(TaskKind::kExitBarrier, Span::kOnce, 1, 1);
  Append(is_fused ? last_shared : TaskKind::kTokenReduce, Span::kTokenBlocks,
         is_fused ? shape_.fused_reduce_tasks() : shape_.token_reduce_tiles,
         is_fused ? shape_.ring.minibatch_blocks : 1);
}

MOK_HOST_DEVICE inline void ProgramView::ListBackward() {
  const int64_t minibatch = shape_.ring.minibatch_blocks;
  const int64_t output_panel =
      shape_.output_panel_blocks > 0 ? shape_.output_panel_blocks : minibatch;
  const int64_t intermediate = shape_.intermediate_tiles;
  const int64_t exchange = shape_.exchange_tiles;
  const int64_t down_grad = shape_.down_grad_tiles;
  const int64_t shared_down = shape_.shared_weight_grad_down_tiles;
  const int64_t shared_gate_up = shape_.shared_weight_grad_gate_up_tiles;
  const int64_t shared_hidden_tiles = shape_.has_shared_expert() ? shape_.hidden_tiles : 0;
  Append(TaskKind::kEntryBarrier, Span::kOnce, 1, 1);
  if (shape_.is_shared_recomputed()) {
    Append(TaskKind::kSharedRecomputeGateUp, Span::kTokenBlocks, shape_.shared_intermediate_tiles,
           minibatch);
  }
  Append(TaskKind::kSharedDownGrad, Span::kTokenBlocks, shape_.shared_down_grad_tiles, minibatch);
  stream_begin_ = num_segments_;
  Append(TaskKind::kRecomputeGateUp, Span::kFirst, intermediate, minibatch, true);
  Append(TaskKind::kRecomputeGateUp, Span::kSecond, intermediate, minibatch, true);
  Append(TaskKind::kDownGrad, Span::kFirst, down_grad, minibatch);
  if (shape_.early_shared_weight_grads) {
    Append(TaskKind::kSharedWeightGradDown, Span::kAtStart, shared_down, 1);
    Append(TaskKind::kSharedWeightGradGateUp, Span::kAtStart, shared_gate_up, 1);
  }
  Append(TaskKind::kRecomputeGateUp, Span::kAfterNext, intermediate, minibatch, true);
  Append(TaskKind::kDownGrad, Span::kNext, down_grad, minibatch);
  Append(TaskKind::kRecomputeDispatch, Span::kIncoming, exchange, 1, true);
  Append(TaskKind::kReverseCombine, Span::kIncoming, exchange, 1);
  Append(TaskKind::kReverseDispatch, Span::kBehind, exchange, 1);
  Append(TaskKind::kInputGrad, Span::kCurrent, shape_.hidden_tiles, output_panel);
  Append(TaskKind::kWeightGradDown, Span::kPieces, shape_.weight_grad_tiles(), 1);
  Append(TaskKind::kReverseDispatch, Span::kLast, exchange, 1);
  Append(TaskKind::kRecomputeDispatch, Span::kLeadIn, exchange, 1, true);
  Append(TaskKind::kReverseCombine, Span::kLeadIn, exchange, 1);
  epilogue_begin_ = num_segments_;
  if (!shape_.fuses_token_reduce()) {
    Append(TaskKind::kSharedInputGrad, Span::kTokenBlocks, shared_hidden_tiles, output_panel);
  }
  const Span late = shape_.early_shared_weight_grads ? Span::kWithoutRows : Span::kOnce;
  Append(TaskKind::kSharedWeightGradDown, late, shared_down, 1);
  Append(TaskKind::kSharedWeightGradGateUp, late, shared_gate_up, 1);
  Append(TaskKind::kWeightGradDown, Span::kEmptyExperts, shape_.weight_grad_tiles(), 1);
  AppendReduction(TaskKind::kSharedInputGrad);
}

MOK_HOST_DEVICE inline void ProgramView::CountTasks(Queue queue) {
  const int number = static_cast<int>(queue);
  MOK_NO_UNROLL
  for (int i = stream_begin_; i < epilogue_begin_; ++i) {
    const Segment& segment = segments_[i];
    if (!segment.IsIn(queue)) continue;
    const int span = static_cast<int>(segment.span);
    if (!segment.only_recomputed) span_tiles_[number][0][span] += segment.tiles;
    span_tiles_[number][1][span] += segment.tiles;
  }
  stream_tasks_begin_[number] = NumTasksOfSegments(queue, 0, stream_begin_);
  epilogue_tasks_begin_[number] =
      stream_tasks_begin_[number] + StreamBegin(queue, num_macrobatches_);
  num_tasks_[number] =
      epilogue_tasks_begin_[number] + NumTasksOfSegments(queue, epilogue_begin_, num_segments_);
}

MOK_HOST_DEVICE inline Task ProgramView::Decode(Queue queue, int64_t index) const {
  const Step none;
  const int64_t stream_begin = stream_tasks_begin_[static_cast<int>(queue)];
  const int64_t epilogue_begin = epilogue_tasks_begin_[static_cast<int>(queue)];
  if (index < stream_begin) return DecodeSegments(queue, 0, stream_begin_, none, index);
  if (index >= epilogue_begin) {
    return DecodeSegments(queue, epilogue_begin_, num_segments_, none, index - epilogue_begin);
  }
  index -= stream_begin;
  const Step step = FindStep(queue, &index);
  return DecodeSegments(queue, stream_begin_, epilogue_begin_, step, index);
}

MOK_HOST_DEVICE inline ProgramView::Blocks ProgramView::BlocksOf(Span span,
                                                                 const Step& step) const {
  const RingPlan& ring = shape_.ring;
  if (span == Span::kLeadIn) {
    if (step.lead_in_macrobatch < 0) return {};
    return {ring.first_block_of_macrobatch(step.lead_in_macrobatch),
            LeadInBlocks(step.lead_in_macrobatch)};
  }
  if (step.macrobatch < 0) return {};
  int64_t minibatch = step.index + static_cast<int>(span) - static_cast<int>(Span::kCurrent);
  if (span == Span::kIncoming) minibatch = step.index + kLeadMinibatches;
  if (span == Span::kFirst || span == Span::kSecond) {
    if (step.index != 0) return {};
    minibatch = span == Span::kFirst ? 0 : 1;
  }
  if (span == Span::kLast) {
    if (!step.is_last) return {};
    minibatch = step.index;
  }
  const int64_t begin = minibatch * ring.minibatch_blocks;
  const int64_t rest = ring.blocks_in_macrobatch(step.macrobatch) - begin;
  if (begin < 0 || rest <= 0) return {};
  return {ring.first_block_of_macrobatch(step.macrobatch) + begin,
          rest < ring.minibatch_blocks ? rest : ring.minibatch_blocks};
}

MOK_HOST_DEVICE inline ProgramView::Blocks ProgramView::ElementsOf(const Segment& segment,
                                                                   const Step& step) const {
  switch (segment.span) {
    case Span::kOnce:
      return {0, 1};
    case Span::kTokenBlocks:
      return {0, shape_.token_blocks};
    case Span::kEmptyExperts:
      return {0, NumPieces(num_macrobatches_)};
    case Span::kWithoutRows:
      return {0, num_macrobatches_ == 0 ? 1 : 0};
    case Span::kAtStart:
      return {0, IsStart(step) ? 1 : 0};
    case Span::kPieces:
      return {0, step.is_last ? NumPieces(step.macrobatch) : 0};
    default:
      break;
  }
  const int64_t macrobatch =
      segment.span == Span::kLeadIn ? step.lead_in_macrobatch : step.macrobatch;
  if (segment.only_recomputed && !shape_.is_recomputed(macrobatch)) return {};
  return BlocksOf(segment.span, step);
}

MOK_HOST_DEVICE inline int64_t ProgramView::NumTasksOfSegments(Queue queue, int begin,
                                                               int end) const {
  const Step none;
  int64_t count = 0;
  MOK_NO_UNROLL
  for (int i = begin; i < end; ++i) {
    if (!segments_[i].IsIn(queue)) continue;
    count += segments_[i].tiles * NumElements(segments_[i], none);
  }
  return count;
}

MOK_HOST_DEVICE inline Task ProgramView::DecodeSegments(Queue queue, int begin, int end,
                                                        const Step& step, int64_t index) const {
  for (int i = begin; i < end; ++i) {
    if (!segments_[i].IsIn(queue)) continue;
    const int64_t count = segments_[i].tiles * NumElements(segments_[i], step);
    if (index < count) return DecodeElement(segments_[i], step, index);
    index -= count;
  }
  return {TaskKind::kExitBarrier, -1, -1, -1, -1};  // unreachable for an index in range
}

MOK_HOST_DEVICE inline Task ProgramView::DecodeWithoutBlocks(const Segment& segment,
                                                             const Step& step,
                                                             int64_t index) const {
  if (segment.span != Span::kPieces && segment.span != Span::kEmptyExperts) {
    return {segment.kind, -1, static_cast<int32_t>(index), -1, -1};
  }
  const int64_t macrobatch = segment.span == Span::kPieces ? step.macrobatch : -1;
  return WeightGradTask(macrobatch, index / segment.tiles, index % segment.tiles);
}

MOK_HOST_DEVICE inline Task ProgramView::DecodeElement(const Segment& segment, const Step& step,
                                                       int64_t index) const {
  if (HasNoBlocks(segment.span)) return DecodeWithoutBlocks(segment, step, index);
  const int64_t tiles = segment.tiles;
  const bool tokens = segment.span == Span::kTokenBlocks;
  const Blocks blocks = ElementsOf(segment, step);
  const int64_t panel_begin = index / (segment.panel_blocks * tiles) * segment.panel_blocks;
  const int64_t in_panel = index - panel_begin * tiles;
  const int64_t left = blocks.count - panel_begin;
  const int64_t panel_blocks = left < segment.panel_blocks ? left : segment.panel_blocks;
  const int64_t block = blocks.first + panel_begin + in_panel % panel_blocks;
  const int64_t tile = in_panel / panel_blocks;
  if (!tokens) return BlockTask(segment.kind, block, tile);
  return {segment.kind, static_cast<int32_t>(block), static_cast<int32_t>(tile), -1, -1};
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
  const int64_t list = macrobatch < 0 ? num_macrobatches_ : macrobatch;
  const int32_t expert = pieces_.piece_expert[pieces_.piece_begin[list] + piece];
  const bool down = tile < shape_.weight_grad_down_tiles;
  return {down ? TaskKind::kWeightGradDown : TaskKind::kWeightGradGateUp, -1,
          static_cast<int32_t>(down ? tile : tile - shape_.weight_grad_down_tiles), expert,
          static_cast<int32_t>(macrobatch)};
}

MOK_HOST_DEVICE inline int64_t ProgramView::LeadInBlocks(int64_t macrobatch) const {
  const int64_t blocks = shape_.ring.blocks_in_macrobatch(macrobatch);
  const int64_t lead = kLeadMinibatches * shape_.ring.minibatch_blocks;
  return blocks < lead ? blocks : lead;
}

MOK_HOST_DEVICE inline int64_t ProgramView::StreamBegin(Queue queue, int64_t position) const {
  const RingPlan& ring = shape_.ring;
  const int64_t num_macrobatches = num_macrobatches_;
  if (num_macrobatches == 0) return 0;
  // Row blocks that are done with, and those that have come in, when the step begins.
  int64_t done = position * ring.macrobatch_blocks;
  if (position > 0 && (shape_.pass == Pass::kForward || position == num_macrobatches)) {
    // The one macrobatch that may be short, the last, has run.
    done -= ring.macrobatch_blocks - ring.blocks_in_macrobatch(num_macrobatches - 1);
  }
  const int64_t incoming =
      position < num_macrobatches ? done + LeadInBlocks(MacrobatchAt(position)) : done;
  // Those of them that are kept: they run first. (Nothing is recomputed in the forward.)
  const int64_t kept = shape_.kept_macrobatches * ring.macrobatch_blocks;
  const int64_t blocks[2] = {done < kept ? done : kept, done > kept ? done - kept : 0};
  const int64_t leads[2] = {incoming < kept ? incoming : kept,
                            incoming > kept ? incoming - kept : 0};
  int64_t begin = 0;
  MOK_NO_UNROLL
  for (int recomputed = 0; recomputed < 2; ++recomputed) {
    const int64_t* tiles = SpanTiles(queue, recomputed != 0);
    // Every kind that runs over the row blocks is in one of these spans, and in others only to fill
    // or drain the pipeline.
    begin += blocks[recomputed] *
             (tiles[static_cast<int>(Span::kBehind)] + tiles[static_cast<int>(Span::kCurrent)] +
              tiles[static_cast<int>(Span::kNext)] + tiles[static_cast<int>(Span::kAfterNext)]);
    begin += leads[recomputed] * tiles[static_cast<int>(Span::kIncoming)];
  }
  if (position > 0) begin += SpanTiles(queue, false)[static_cast<int>(Span::kAtStart)];
  if (shape_.pass == Pass::kBackward) {
    begin +=
        SpanTiles(queue, false)[static_cast<int>(Span::kPieces)] * pieces_.piece_begin[position];
  }
  return begin;
}

MOK_HOST_DEVICE inline int64_t ProgramView::StepBegin(const int64_t* tiles, int64_t macrobatch,
                                                      int64_t step) const {
  if (step == 0) return 0;
  const int64_t minibatch = shape_.ring.minibatch_blocks;
  const int64_t end = shape_.ring.blocks_in_macrobatch(macrobatch);
  // Row blocks of the first minibatches of the macrobatch.
  const auto blocks_of = [=](int64_t minibatches) {
    return minibatches * minibatch < end ? minibatches * minibatch : end;
  };
  const auto tiles_of = [=](Span span) { return tiles[static_cast<int>(span)]; };
  return (macrobatch == MacrobatchAt(0) ? tiles_of(Span::kAtStart) : 0) +
         tiles_of(Span::kFirst) * blocks_of(1) +
         tiles_of(Span::kSecond) * (blocks_of(2) - blocks_of(1)) +
         tiles_of(Span::kBehind) * blocks_of(step - 1) +
         tiles_of(Span::kCurrent) * blocks_of(step) +
         tiles_of(Span::kNext) * (blocks_of(step + 1) - blocks_of(1)) +
         tiles_of(Span::kAfterNext) * (blocks_of(step + 2) - blocks_of(2)) +
         tiles_of(Span::kIncoming) *
             (blocks_of(step + kLeadMinibatches) - blocks_of(kLeadMinibatches));
}

MOK_HOST_DEVICE inline ProgramView::Step ProgramView::FindStep(Queue queue, int64_t* index) const {
  const RingPlan& ring = shape_.ring;
  const int64_t num_macrobatches = num_macrobatches_;
  Step step;
  if (*index < StreamBegin(queue, 0)) {
    step.lead_in_macrobatch = MacrobatchAt(0);
    return step;
  }
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
  const int64_t next = position + 1 < num_macrobatches ? MacrobatchAt(position + 1) : -1;
  const int64_t* tiles = SpanTiles(queue, shape_.is_recomputed(macrobatch));
  const int64_t num_steps = ring.minibatches_in_macrobatch(macrobatch);
  const int64_t lead_in_step = LeadInStep(num_steps);
  int64_t lead_in_tasks = 0;
  if (next >= 0) {
    lead_in_tasks = LeadInBlocks(next) *
                    SpanTiles(queue, shape_.is_recomputed(next))[static_cast<int>(Span::kLeadIn)];
  }
  const auto begin_of = [&](int64_t j) {
    return StepBegin(tiles, macrobatch, j) + (j > lead_in_step ? lead_in_tasks : 0);
  };
  int64_t j = 0;
  const int64_t second_begin = begin_of(1);
  if (num_steps > 1 && *index >= second_begin) {
    // Steps 1 to num_steps - kLeadMinibatches - 2 are equally long: all their spans are full
    // minibatches. That leaves a few steps at the end to try.
    const int64_t irregular =
        num_steps > kLeadMinibatches + 2 ? num_steps - kLeadMinibatches - 1 : 1;
    int64_t step_tasks = 0;
    for (int span = static_cast<int>(Span::kBehind); span <= static_cast<int>(Span::kIncoming);
         ++span) {
      step_tasks += tiles[span] * ring.minibatch_blocks;
    }
    j = 1 + (*index - second_begin) / step_tasks;
    if (j >= irregular) {
      j = num_steps - 1;
      while (j > irregular && *index < begin_of(j)) --j;
    }
  }
  if (j > 0) *index -= begin_of(j);
  step.macrobatch = macrobatch;
  step.index = j;
  step.is_last = j == num_steps - 1;
  if (j == lead_in_step) step.lead_in_macrobatch = next;
  return step;
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
  MOK_NO_UNROLL
  for (int i = 0; i < kNumCounterFamilies; ++i) {
    const auto family = static_cast<CounterFamily>(i);
    counter_begin_[i] = static_cast<int32_t>(begin);
    if (family <= CounterFamily::kSent) {
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
