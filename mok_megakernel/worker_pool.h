// Persistent worker threads that run one function at a time together with the calling thread.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "mok_core/status.h"

namespace mok {

// One caller at a time. Workers sleep between runs: they spin for some microseconds, for the next
// pass of a small layer, and then give their core away.
class WorkerPool {
 public:
  // What happens to workers that have not woken up by the time the caller's own part is done.
  enum class Latecomers {
    kAwait,  // every worker runs the body
    kSkip,   // they do not run it: for bodies that share one list of work, which is empty by then.
             // A tiny pass then does not wait for threads that it did not need
  };

  WorkerPool();
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Starts threads until runs of `num_workers` workers (the caller is one of them) are possible.
  // kResourceExhausted when the system gives no more threads.
  Status Reserve(int num_workers);

  // Calls body(worker) at most once for every worker in [0, num_workers), at the same time, worker
  // 0 on the calling thread; returns when all calls are done. num_workers <= the largest number
  // reserved.
  void Run(int num_workers, Latecomers latecomers, const std::function<void(int worker)>& body);

  // Threads started so far; the caller's own is not counted.
  int num_threads() const { return static_cast<int>(threads_.size()); }

 private:
  struct Thread;

  std::vector<std::unique_ptr<Thread>> threads_;
};

}  // namespace mok
