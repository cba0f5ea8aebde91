// The work source of persistent grids: an atomic ticket in global memory. Same contract as
// mok_core/work_source.h.
#pragma once

#include "mok_core/device/device.h"
#include "mok_core/device/ticket_counter.h"

namespace mok {

// Tasks 0 to num_tasks - 1, each handed out once over the whole grid, in ascending order. One
// thread per block calls; it passes the task on through a pipeline.
class TicketWorkSource {
 public:
  MOK_DEVICE TicketWorkSource(TicketCounter* counter, int64_t num_tasks)
      : counter_(counter), num_tasks_(num_tasks) {}

  // Claims one task; false when none is left, and then always. Relaxed: tasks order each other by
  // counters, not by the ticket.
  MOK_DEVICE bool Next(int64_t& task) {
    task = static_cast<int64_t>(AtomicAddRelaxedGpu(&counter_->next, uint64_t{1}));
    return task < num_tasks_;
  }

  // By the same thread after its last Next, exactly once per block. The grid's last caller resets
  // the counter.
  MOK_DEVICE void Finish(uint64_t num_blocks) {
    const uint64_t before = AtomicAddAcquireReleaseGpu(&counter_->finished_blocks, uint64_t{1});
    if (before + 1 != num_blocks) return;
    StoreRelaxedGpu(&counter_->next, uint64_t{0});
    StoreRelaxedGpu(&counter_->finished_blocks, uint64_t{0});
  }

 private:
  TicketCounter* counter_;
  int64_t num_tasks_;
};

}  // namespace mok
