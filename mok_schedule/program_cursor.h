// Decodes the tasks of a queue in ascending order. ProgramView::Decode finds any task, at the cost
// of a search; workers take tasks in ascending order and stay in the same few segments for long, so
// that a cursor gets by with two divisions of 32 bits.
#pragma once

#include <cstdint>

#include "mok_core/macros.h"
#include "mok_schedule/program_view.h"

namespace mok {

// For programs whose segments have less than 2^31 tasks in each step.
class ProgramCursor {
 public:
  // `program` has to outlive the cursor.
  MOK_HOST_DEVICE ProgramCursor(const ProgramView& program, Queue queue)
      : program_(&program), queue_(queue), segment_(-1), list_end_(program.stream_begin_) {}

  // What ProgramView::Decode(queue, index) returns. `index` is at least that of the call before,
  // and less than NumTasks(queue).
  MOK_HOST_DEVICE Task Seek(int64_t index) {
    MOK_NO_UNROLL
    while (index >= end_) NextRun();
    const Segment& segment = program_->segments_[segment_];
    if (ProgramView::HasNoBlocks(segment.span)) {
      return program_->DecodeWithoutBlocks(segment, step_, index - begin_);
    }
    return DecodeBlock(segment, static_cast<uint32_t>(index - begin_));
  }

 private:
  using Step = ProgramView::Step;

  // The part of the program that the current list of segments belongs to.
  enum class Part : int32_t { kPrologue, kLeadIn, kStream, kEpilogue };

  MOK_HOST_DEVICE Task DecodeBlock(const Segment& segment, uint32_t index) const {
    const uint32_t tiles = static_cast<uint32_t>(segment.tiles);
    const uint32_t panel = index / (panel_blocks_ * tiles);
    const uint32_t panel_begin = panel * panel_blocks_;
    const uint32_t in_panel = index - panel_begin * tiles, left = num_blocks_ - panel_begin;
    const uint32_t blocks = left < panel_blocks_ ? left : panel_blocks_;
    const uint32_t tile = in_panel / blocks;
    const int32_t block =
        first_block_ + static_cast<int32_t>(panel_begin + in_panel - tile * blocks);
    Task task = {segment.kind, block, static_cast<int32_t>(tile), -1, -1};
    if (segment.span == Span::kTokenBlocks) return task;
    task.expert = program_->table().expert_of_block(block);
    task.macrobatch = static_cast<int32_t>(segment.span == Span::kLeadIn ? step_.lead_in_macrobatch
                                                                         : step_.macrobatch);
    return task;
  }

  // Enters the next segment of the queue, which may be empty.
  MOK_HOST_DEVICE void NextRun() {
    MOK_NO_UNROLL
    do {
      if (++segment_ == list_end_) NextList();
    } while (!program_->segments_[segment_].IsIn(queue_));
    const Segment& segment = program_->segments_[segment_];
    const ProgramView::Blocks blocks = program_->ElementsOf(segment, step_);
    begin_ = end_;
    end_ += segment.tiles * blocks.count;
    first_block_ = static_cast<int32_t>(blocks.first);
    num_blocks_ = static_cast<uint32_t>(blocks.count);
    panel_blocks_ = static_cast<uint32_t>(segment.panel_blocks < blocks.count ? segment.panel_blocks
                                                                              : blocks.count);
  }

  // Enters the next list of segments: that of the next step, or of the next part.
  MOK_HOST_DEVICE void NextList() {
    const int64_t num_macrobatches = program_->num_macrobatches();
    if (part_ == Part::kPrologue) {
      part_ = Part::kLeadIn;
      step_.lead_in_macrobatch = num_macrobatches > 0 ? program_->MacrobatchAt(0) : -1;
    } else {
      const bool is_first = part_ == Part::kLeadIn || step_.is_last;  // of a macrobatch
      if (is_first && part_ == Part::kStream) ++position_;
      part_ = Part::kStream;
      EnterStep(is_first ? 0 : step_.index + 1);
    }
    if (position_ == num_macrobatches && part_ == Part::kStream) {
      part_ = Part::kEpilogue;
      step_ = {};
      segment_ = program_->epilogue_begin_;
      list_end_ = program_->num_segments_;
    } else {
      segment_ = program_->stream_begin_;
      list_end_ = program_->epilogue_begin_;
    }
  }

  // Step `index` of the macrobatch at position_.
  MOK_HOST_DEVICE void EnterStep(int64_t index) {
    const int64_t num_macrobatches = program_->num_macrobatches();
    if (position_ >= num_macrobatches) return;
    step_.macrobatch = program_->MacrobatchAt(position_);
    step_.index = index;
    const int64_t num_steps = program_->shape().ring.minibatches_in_macrobatch(step_.macrobatch);
    step_.is_last = index == num_steps - 1;
    const bool leads_in =
        position_ + 1 < num_macrobatches && index == program_->LeadInStep(num_steps);
    step_.lead_in_macrobatch = leads_in ? program_->MacrobatchAt(position_ + 1) : -1;
  }

  const ProgramView* program_;
  Queue queue_;
  int segment_, list_end_;  // the current segment, and the end of its list
  Part part_ = Part::kPrologue;
  int64_t position_ = 0;  // of the macrobatch, in order of execution
  Step step_;
  int64_t begin_ = 0, end_ = 0;  // tasks of the current segment
  int32_t first_block_ = 0;
  uint32_t num_blocks_ = 0, panel_blocks_ = 1;
};

}  // namespace mok
