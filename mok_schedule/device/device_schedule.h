// A schedule in device memory: routing table, piece tables and what a pass needs to know of them to
// make its ProgramView. The schedule kernel writes it; no host reads it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

#include "mok_core/bits.h"
#include "mok_core/macros.h"
#include "mok_schedule/program_view.h"
#include "mok_schedule/ring_plan.h"
#include "mok_schedule/routing_table.h"

namespace mok {

// What the schedule kernels and the passes of one rank know of refused schedules. Device memory,
// zero at first.
//
// All ranks refuse a batch in which one has an invalid id or cannot take part, or in which they
// disagree. A rank whose host has heard of it may make no more calls, and the calls that the other
// hosts had queued by then must not wait for it. So nothing takes part in anything from the refused
// batch on until this rank's host has raised the error (ScheduleSteps::kResume); the batches that
// take part are the same on all ranks, whenever each of them hears. Schedules from before a refusal
// are lost with it: some ranks may have run a pass of them after it, to no effect, and others not.
struct RefusalState {
  // Odd from a refusal until the host has raised it. Of one rank alone, which nobody waits for, it
  // stays zero.
  uint64_t generation;
  // 1: a pass of a lost schedule has run though the host had heard of the refusal. The next batch
  // is refused for it.
  uint64_t late_passes;
};

MOK_HOST_DEVICE constexpr bool IsUnheard(uint64_t generation) { return generation % 2 != 0; }

// Sizes of a schedule that depend on the batch.
struct DeviceScheduleResult {
  int64_t num_row_blocks;  // of the routing table; 0 after an error
  int64_t total_tokens;    // of all ranks; 0 after an error
  // RefusalState::generation at its batch, or kRefused.
  uint64_t generation;

  static constexpr uint64_t kRefused = UINT64_MAX;
};

// Whether a pass of the schedule does anything; on all ranks or on none.
MOK_HOST_DEVICE inline bool TakesPart(const DeviceScheduleResult& schedule,
                                      const RefusalState& refusals) {
  return schedule.generation == refusals.generation;
}

// Whether one that does not runs although the host has heard.
MOK_HOST_DEVICE inline bool IsLate(const DeviceScheduleResult& schedule,
                                   const RefusalState& refusals) {
  const uint64_t generation = refusals.generation;
  return generation > 0 && !IsUnheard(generation) && !TakesPart(schedule, refusals);
}

// The first row of each token that has rows on this rank: its other rows hold the same values.
struct FirstRows {
  int32_t* of_token;   // [ep_size, max_tokens], of the others undefined; null: nobody needs it
  int64_t max_tokens;  // of a rank
};

// Pointers into device memory; what the arrays hold is said at RoutingTableView and PieceTables.
struct DeviceSchedule {
  int32_t* source_rank;         // [capacity rows]
  int32_t* source_route;        // [capacity rows]
  int32_t* expert_block_begin;  // [num_local_experts + 1]
  int32_t* expert_rows;         // [num_local_experts]
  int32_t* block_expert;        // [capacity rows / kRowBlock]
  FirstRows first_rows;
  PieceTables pieces;  // for macrobatch_blocks; sized for the capacity
  DeviceScheduleResult* result;
  int64_t macrobatch_blocks;  // of the ring that the pieces are for
  int32_t num_local_experts;

  MOK_HOST_DEVICE RoutingTableView table() const {
    return {source_rank, source_route, expert_block_begin,
            expert_rows, block_expert, num_local_experts};
  }
};

// The program of a pass over the schedule, or over none of its rows if !has_rows, in `view`; for
// device code. CountTasks has to follow for every queue. `shape` is complete but for
// ring.num_row_blocks, and shape.ring.macrobatch_blocks is the schedule's.
MOK_HOST_DEVICE inline void PlaceUncountedProgramView(ProgramShape shape,
                                                      const DeviceSchedule& schedule, bool has_rows,
                                                      ProgramView* view) {
  shape.ring.num_row_blocks = has_rows ? schedule.result->num_row_blocks : 0;
  new (view) ProgramView(ProgramView::Uncounted(), shape, schedule.table(), schedule.pieces);
}

// Sizes of the arrays of a schedule.
struct DeviceScheduleShape {
  int64_t capacity_rows;  // RoutingTableCapacityRows of the largest batch
  int32_t num_local_experts;
  int64_t macrobatch_blocks;
  int64_t ep_size;
  int64_t max_tokens;  // of a rank
  int32_t topk;

  // Whether a token of another rank may have several rows.
  bool has_first_rows() const { return ep_size > 1 && topk > 1; }
};

// Where the arrays of a schedule lie in one allocation.
class DeviceScheduleLayout {
 public:
  explicit DeviceScheduleLayout(const DeviceScheduleShape& shape) : shape_(shape) {
    const int64_t blocks = shape.capacity_rows / kRowBlock, experts = shape.num_local_experts;
    const int64_t macrobatches = CeilDiv(blocks, shape.macrobatch_blocks);
    Place(kResult, sizeof(DeviceScheduleResult));
    Place(kSourceRank, shape.capacity_rows * kInt);
    Place(kSourceRoute, shape.capacity_rows * kInt);
    Place(kExpertBlockBegin, (experts + 1) * kInt);
    Place(kExpertRows, experts * kInt);
    Place(kBlockExpert, blocks * kInt);
    Place(kFirstRow, shape.has_first_rows() ? shape.ep_size * shape.max_tokens * kInt : 0);
    Place(kPieceBegin, (macrobatches + 2) * kInt);
    Place(kPieceExpert, (experts + macrobatches) * kInt);
    Place(kCarryOwner, (macrobatches + 1) * kInt);
  }

  int64_t bytes() const { return bytes_; }

  // `base`: bytes() of device memory, 128-byte aligned. Need not be initialised.
  DeviceSchedule At(void* base) const {
    const auto array = [&](Array name) {
      return reinterpret_cast<int32_t*>(static_cast<std::byte*>(base) + begin_[name]);
    };
    DeviceSchedule schedule;
    schedule.source_rank = array(kSourceRank);
    schedule.source_route = array(kSourceRoute);
    schedule.expert_block_begin = array(kExpertBlockBegin);
    schedule.expert_rows = array(kExpertRows);
    schedule.block_expert = array(kBlockExpert);
    schedule.first_rows = {shape_.has_first_rows() ? array(kFirstRow) : nullptr, shape_.max_tokens};
    schedule.pieces = {array(kPieceBegin), array(kPieceExpert), array(kCarryOwner)};
    schedule.result = reinterpret_cast<DeviceScheduleResult*>(array(kResult));
    schedule.macrobatch_blocks = shape_.macrobatch_blocks;
    schedule.num_local_experts = shape_.num_local_experts;
    return schedule;
  }

 private:
  enum Array {
    kResult,
    kSourceRank,
    kSourceRoute,
    kExpertBlockBegin,
    kExpertRows,
    kBlockExpert,
    kFirstRow,
    kPieceBegin,
    kPieceExpert,
    kCarryOwner,
    kNumArrays,
  };
  static constexpr int64_t kInt = sizeof(int32_t);
  static constexpr int64_t kAlignment = 128;

  void Place(Array name, int64_t bytes) {
    begin_[name] = bytes_;
    bytes_ += RoundUp(bytes, kAlignment);
  }

  DeviceScheduleShape shape_;
  int64_t begin_[kNumArrays];
  int64_t bytes_ = 0;
};

}  // namespace mok
