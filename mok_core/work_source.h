// Where a worker gets its next task. One contract for every placement: threads here, tickets of a
// persistent grid in device/ticket_work_source.h. A work source knows numbers, not tensors.
#pragma once

#include <atomic>
#include <concepts>
#include <cstdint>

#include "mok_core/macros.h"

namespace mok {

// Next(task) claims one task and returns true, or returns false when none is left, and then always.
// Each index is claimed exactly once among all workers, in ascending order: whoever holds task i
// knows that every j < i is done or held by a running worker. Freedom from deadlock rests on it.
template <class Source>
concept WorkSource = requires(Source& source, int64_t& task) {
  { source.Next(task) } -> std::same_as<bool>;
};

// Tasks 0 to num_tasks - 1, handed to any number of threads by one atomic ticket.
class ThreadWorkSource {
 public:
  explicit ThreadWorkSource(int64_t num_tasks) : num_tasks_(num_tasks) {}
  ThreadWorkSource(const ThreadWorkSource&) = delete;
  ThreadWorkSource& operator=(const ThreadWorkSource&) = delete;

  bool Next(int64_t& task) {
    // The early look keeps late callers from pushing the ticket on for ever.
    if (next_.load(std::memory_order_relaxed) >= num_tasks_) return false;
    // Relaxed: tasks order each other by counters, not by the ticket.
    task = next_.fetch_add(1, std::memory_order_relaxed);
    return task < num_tasks_;
  }

  int64_t num_tasks() const { return num_tasks_; }

 private:
  const int64_t num_tasks_;
  alignas(kCacheLineBytes) std::atomic<int64_t> next_{0};
};

static_assert(WorkSource<ThreadWorkSource>);

}  // namespace mok
