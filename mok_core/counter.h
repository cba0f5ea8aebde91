// Monotonic counters: the only way in which tasks, workers and ranks order each other.
//
// A counter starts at zero (zeroed memory is a valid counter), only ever grows, and may lie in
// private memory or in memory shared between processes. Signal releases, Read and WaitAtLeast
// acquire: whatever a thread wrote before Signal is visible to whoever then sees the new value.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "mok_core/macros.h"
#include "mok_core/status.h"

namespace mok {

struct alignas(kCacheLineBytes) Counter {
  uint64_t value = 0;  // accessed through the functions below only
};

static_assert(sizeof(Counter) == kCacheLineBytes);
static_assert(std::atomic_ref<uint64_t>::is_always_lock_free,
              "counters in shared memory must not hide a lock of one process");

// Adds `amount`; release.
inline void Signal(Counter& counter, uint64_t amount = 1) {
  std::atomic_ref<uint64_t>(counter.value).fetch_add(amount, std::memory_order_release);
}

// The current value; acquire.
inline uint64_t Read(const Counter& counter) {
  // atomic_ref of a const object came with C++26; a load does not write.
  return std::atomic_ref<uint64_t>(const_cast<Counter&>(counter).value)
      .load(std::memory_order_acquire);
}

// Who waits and for how long: the bounds of a wait and the words of its error.
struct WaitContext {
  int rank = 0;            // the waiting rank
  const char* task = "";   // kind of the waiting task; outlives the wait
  int64_t task_index = 0;  // which one
  std::chrono::steady_clock::time_point deadline;
  const std::atomic<bool>* cancelled = nullptr;  // a wait ends early once it is true; may be null
};

namespace counter_internal {
Status WaitSlowly(const Counter& counter, uint64_t target, const WaitContext& context);
}

// Returns once the counter is >= target. Otherwise fails with kDeadlineExceeded at the deadline, or
// kAborted soon after *cancelled becomes true; the text names rank, task, expected and observed.
// A counter that has arrived wins over an expired deadline. The wait spins for about a microsecond,
// then yields, then sleeps with a growing interval (at most 0.25 ms), so that many waiters on few
// cores leave them to those who work.
inline Status WaitAtLeast(const Counter& counter, uint64_t target, const WaitContext& context) {
  if (Read(counter) >= target) return OkStatus();
  return counter_internal::WaitSlowly(counter, target, context);
}

// WaitAtLeast for each of `num_counters` consecutive counters.
Status WaitAllAtLeast(const Counter* counters, int64_t num_counters, uint64_t target,
                      const WaitContext& context);

// The waiting policy behind WaitAtLeast, for waits on other conditions. Call Pause between two
// looks at the condition.
class BackOff {
 public:
  void Pause();

 private:
  int pauses_ = 0;
};

}  // namespace mok
