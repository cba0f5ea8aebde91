// Runs the task program of one pass on one rank: workers take tasks from their queue, wait for what
// each needs, run its role and signal.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "mok_core/counter.h"
#include "mok_core/status.h"
#include "mok_core/work_source.h"
#include "mok_megakernel/engine_config.h"
#include "mok_megakernel/pass_builder.h"
#include "mok_megakernel/workspace.h"

namespace mok {

// One pass, run once. With communication workers, compute and communication are two queues; without
// them every worker takes the merged order. The first error cancels the pass: waits end, all
// workers leave after their current task, and Run returns that error.
class PassExecutor {
 public:
  // All outlive the executor; the workspace is locked and has workers for config.crew.
  PassExecutor(Workspace& workspace, const EngineConfig& config, const PreparedPass& pass);

  // Errors: the verdict of the handshake, when a rank has an error or ranks disagree; otherwise
  // kDeadlineExceeded, when a rank does not come to a barrier, or no task of this rank finishes,
  // within the timeout.
  Status Run();

  // After Run: whether the error is the verdict of the handshake, which all ranks share and which
  // leaves the workspace usable.
  bool rejected() const { return rejected_; }

 private:
  void RunWorker(int worker);
  void StageInputs();
  Status RunTask(int worker, const Task& task, int64_t index);
  Status RunRole(int worker, const Task& task, int64_t index);
  void RunExchange(const Task& task);
  Status RunEntryBarrier(int64_t index);
  Status RunExitBarrier(int64_t index);

  Status AwaitDependencies(const Dependencies& dependencies, const Task& task, int64_t index);
  // Bounded by progress: fails only when no task of this rank finishes for the time allowed.
  Status AwaitCounters(const Counter* counters, int count, uint64_t target, const Task& task,
                       int64_t index);
  WaitContext ContextOf(const char* task, int64_t index, std::chrono::nanoseconds allowed) const;
  uint64_t FinishedTasks() const;
  void Cancel(const Status& error);

  // Written by one worker, summed by those who wait.
  struct alignas(kCacheLineBytes) WorkerProgress {
    std::atomic<uint64_t> finished_tasks{0};
  };

  Workspace& workspace_;
  const EngineConfig& config_;
  const PreparedPass& pass_;
  const TaskProgram& program_;
  const int64_t num_staged_chunks_;
  ThreadWorkSource staging_;
  ThreadWorkSource first_queue_;          // compute, or merged without communication workers
  ThreadWorkSource second_queue_;         // communication
  Counter staged_chunks_;                 // finished
  std::vector<WorkerProgress> progress_;  // [workers]
  std::atomic<bool> cancelled_{false};
  std::mutex error_mutex_;
  Status error_;  // the first
  bool rejected_ = false;
};

}  // namespace mok
