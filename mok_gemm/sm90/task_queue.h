// Tasks from one scheduler thread to the roles of its block, through shared memory. The scheduler
// runs up to kDepth tasks ahead, so that finding and awaiting a task costs the GEMM nothing.
#pragma once

#include "mok_core/device/device.h"
#include "mok_core/device/pipeline.h"

namespace mok {

template <class Task, int kDepth>
struct TaskQueueStorage {
  Task tasks[kDepth];
  PipelineBarriers<kDepth> barriers;
};

// One role's end of the queue: the scheduler pushes, every reader sees every task.
template <class Task, int kDepth>
class TaskQueue {
 public:
  using Storage = TaskQueueStorage<Task, kDepth>;

  // By one thread; FenceMbarrierInit and SyncBlock have to follow. readers: how many threads read
  // every task, and pop it.
  static MOK_DEVICE void Initialize(Storage& storage, uint32_t readers) {
    Pipeline<kDepth>::Initialize(storage.barriers, 1, readers);
    MOK_NAME(storage.tasks, "tasks", -1);
  }

  explicit MOK_DEVICE TaskQueue(Storage& storage)
      : storage_(&storage), pipeline_(storage.barriers) {}

  // Scheduler: waits for a free place.
  template <class Waiter>
  MOK_DEVICE void Push(const Task& task, const Waiter& wait) {
    Place(wait) = task;
    Push();
  }
  // The same without a copy of the task: a place to write it to, and the push.
  template <class Waiter>
  MOK_DEVICE Task& Place(const Waiter& wait) {
    pipeline_.Acquire(wait);
    return storage_->tasks[pipeline_.stage()];
  }
  MOK_DEVICE void Push() {
    pipeline_.Commit();
    pipeline_.Advance();
  }

  // Scheduler, through an object of its own that follows the one it pushes with: all readers have
  // popped the oldest task. Finished goes on to the next one.
  MOK_DEVICE bool IsPopped() const { return pipeline_.IsReleased(); }
  template <class Waiter>
  MOK_DEVICE void AwaitPop(const Waiter& wait) {
    pipeline_.AwaitRelease(wait);
  }
  MOK_DEVICE const Task& Oldest() const { return storage_->tasks[pipeline_.stage()]; }
  MOK_DEVICE void Finished() { pipeline_.Advance(); }

  // Reader: the next task; valid until it is popped.
  template <class Waiter>
  MOK_DEVICE const Task& Front(const Waiter& wait) {
    pipeline_.Wait(wait);
    return storage_->tasks[pipeline_.stage()];
  }

  // Reader: Front would not wait.
  MOK_DEVICE bool IsReady() const { return pipeline_.IsFull(); }

  // Reader, every thread for itself: an arrival of one lane for its warp would do, too, but
  // compute-sanitizer's racecheck does not follow an order that goes through bar.warp.sync and then
  // an mbarrier.
  MOK_DEVICE void Pop() {
    pipeline_.Release();
    pipeline_.Advance();
  }

  // Reader, instead of Pop: goes on to the next task and, later, pops the one that it has left.
  MOK_DEVICE int Leave() {
    const int place = pipeline_.stage();
    pipeline_.Advance();
    return place;
  }
  MOK_DEVICE void PopLeft(int place) { pipeline_.ReleaseStage(place); }

 private:
  Storage* storage_;
  Pipeline<kDepth> pipeline_;
};

}  // namespace mok
