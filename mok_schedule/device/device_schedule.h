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

// Sizes of a schedule that depend on the batch.
struct DeviceScheduleResult {
  int64_t num_row_blocks;  // of the routing table; 0 after an error
  int64_t total_tokens;    // of all ranks; 0 after an error
  // 1: a rank could not take part, or the ranks disagree, as all of them know: passes of this
  // schedule meet nobody, so that nobody waits for a rank that has heard of it and calls no more.
  int64_t is_refused;
};

// Pointers into device memory; what the arrays hold is said at RoutingTableView and PieceTables.
struct DeviceSchedule {
  int32_t* source_rank;         // [capacity rows]
  int32_t* source_route;        // [capacity rows]
  int32_t* expert_block_begin;  // [num_local_experts + 1]
  int32_t* expert_rows;         // [num_local_experts]
  int32_t* block_expert;        // [capacity rows / kRowBlock]
  PieceTables pieces;           // for macrobatch_blocks; sized for the capacity
  DeviceScheduleResult* result;
  int64_t macrobatch_blocks;  // of the ring that the pieces are for
  int32_t num_local_experts;

  MOK_HOST_DEVICE RoutingTableView table() const {
    return {source_rank, source_route, expert_block_begin,
            expert_rows, block_expert, num_local_experts};
  }
};

// The program of a pass over the schedule; for device code. `shape` is complete but for
// ring.num_row_blocks, and shape.ring.macrobatch_blocks is the schedule's.
MOK_HOST_DEVICE inline ProgramView MakeProgramView(ProgramShape shape,
                                                   const DeviceSchedule& schedule) {
  shape.ring.num_row_blocks = schedule.result->num_row_blocks;
  return ProgramView(shape, schedule.table(), schedule.pieces);
}
// The same in `view`; CountTasks has to follow for every queue.
MOK_HOST_DEVICE inline void PlaceUncountedProgramView(ProgramShape shape,
                                                      const DeviceSchedule& schedule,
                                                      ProgramView* view) {
  shape.ring.num_row_blocks = schedule.result->num_row_blocks;
  new (view) ProgramView(ProgramView::Uncounted(), shape, schedule.table(), schedule.pieces);
}

// Where the arrays of a schedule lie in one allocation.
class DeviceScheduleLayout {
 public:
  // capacity_rows: RoutingTableCapacityRows of the largest batch.
  DeviceScheduleLayout(int64_t capacity_rows, int32_t num_local_experts, int64_t macrobatch_blocks)
      : macrobatch_blocks_(macrobatch_blocks), num_local_experts_(num_local_experts) {
    const int64_t blocks = capacity_rows / kRowBlock;
    const int64_t macrobatches = CeilDiv(blocks, macrobatch_blocks);
    Place(kResult, sizeof(DeviceScheduleResult));
    Place(kSourceRank, capacity_rows * kInt);
    Place(kSourceRoute, capacity_rows * kInt);
    Place(kExpertBlockBegin, (int64_t{num_local_experts} + 1) * kInt);
    Place(kExpertRows, int64_t{num_local_experts} * kInt);
    Place(kBlockExpert, blocks * kInt);
    Place(kPieceBegin, (macrobatches + 2) * kInt);
    Place(kPieceExpert, (num_local_experts + macrobatches) * kInt);
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
    schedule.pieces = {array(kPieceBegin), array(kPieceExpert), array(kCarryOwner)};
    schedule.result = reinterpret_cast<DeviceScheduleResult*>(array(kResult));
    schedule.macrobatch_blocks = macrobatch_blocks_;
    schedule.num_local_experts = num_local_experts_;
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

  int64_t macrobatch_blocks_;
  int32_t num_local_experts_;
  int64_t begin_[kNumArrays];
  int64_t bytes_ = 0;
};

}  // namespace mok
