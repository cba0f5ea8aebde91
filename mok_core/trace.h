// Trace recorder: which worker ran which task from when to when.
//
// Each worker writes into its own preallocated buffer: no lock, no allocation, no shared line. A
// full buffer drops further events and counts them. Wherever a recorder is optional, nullptr means
// "no tracing" and costs one branch.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "mok_core/macros.h"
#include "mok_core/status.h"

namespace mok {

struct TraceEvent {
  int32_t kind;        // meaning belongs to the caller (a TaskKind)
  int32_t worker;      // who ran it
  int64_t task_index;  // index in the program, or whatever identifies the task
  int64_t begin_ns;    // TraceClockNs() around the task
  int64_t end_ns;
};

// Nanoseconds of the monotonic clock, one origin for all threads and processes of the machine.
int64_t TraceClockNs();

class TraceRecorder {
 public:
  // Room for `capacity_per_worker` events for each of `num_workers` workers; both >= 0.
  TraceRecorder(int num_workers, int64_t capacity_per_worker);
  ~TraceRecorder();
  TraceRecorder(const TraceRecorder&) = delete;
  TraceRecorder& operator=(const TraceRecorder&) = delete;

  // Wait-free. One thread at a time per worker; different workers at once.
  // worker in [0, num_workers).
  void Record(int worker, int32_t kind, int64_t task_index, int64_t begin_ns, int64_t end_ns);

  // The events of one worker in the order of recording. May be called while the worker records:
  // the events that were complete by then.
  std::span<const TraceEvent> Events(int worker) const;
  // How many events of this worker did not fit.
  int64_t DroppedEvents(int worker) const;
  int num_workers() const { return num_workers_; }
  // Forgets all events and drops; no worker may be recording.
  void Clear();

  // Writes all events in the Chrome trace format (JSON; chrome://tracing, Perfetto): one complete
  // event ("ph":"X") per task with microsecond times relative to the earliest begin, process =
  // `process_id` (the rank), thread = worker. Dropped events are reported in "otherData".
  // Errors: kUnavailable when the file cannot be written, with path and reason.
  Status WriteChromeTrace(const std::string& path,
                          const std::function<std::string(int32_t kind)>& kind_name,
                          int process_id = 0) const;

 private:
  struct Worker;

  const int num_workers_;
  const int64_t capacity_per_worker_;
  std::unique_ptr<Worker[]> workers_;
};

// Records the time from its construction to its destruction; does nothing for a null recorder.
class ScopedTrace {
 public:
  ScopedTrace(TraceRecorder* recorder, int worker, int32_t kind, int64_t task_index)
      : recorder_(recorder), worker_(worker), kind_(kind), task_index_(task_index) {
    if (recorder_ != nullptr) begin_ns_ = TraceClockNs();
  }
  ~ScopedTrace() {
    if (recorder_ != nullptr) {
      recorder_->Record(worker_, kind_, task_index_, begin_ns_, TraceClockNs());
    }
  }
  ScopedTrace(const ScopedTrace&) = delete;
  ScopedTrace& operator=(const ScopedTrace&) = delete;

 private:
  TraceRecorder* const recorder_;
  const int worker_;
  const int32_t kind_;
  const int64_t task_index_;
  int64_t begin_ns_ = 0;
};

}  // namespace mok
