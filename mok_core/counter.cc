#include "mok_core/counter.h"

#include <algorithm>
#include <thread>

namespace mok {
namespace {

// A signal from a running thread usually comes within the spin; a yield costs well under a
// microsecond on an idle core and hands over the core otherwise. Sleeping starts once others have
// had their turn and still nothing came.
constexpr int kSpins = 64;
constexpr int kYields = 64;
constexpr int kMinSleepUs = 4;
constexpr int kMaxSleepUs = 250;
constexpr int kPausesPerDoubling = 8;

void CpuRelax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

Status WaitError(const char* what, StatusCode code, uint64_t target, uint64_t observed,
                 const WaitContext& context) {
  return Status(code, StrCat("rank ", context.rank, ", task ", context.task, " ",
                             context.task_index, ": ", what, " while waiting for a counter: ",
                             "expected >= ", target, ", observed ", observed));
}

}  // namespace

void BackOff::Pause() {
  const int pause = pauses_++;
  if (pause < kSpins) {
    CpuRelax();
    return;
  }
  if (pause < kSpins + kYields) {
    std::this_thread::yield();
    return;
  }
  const int doublings = std::min((pause - kSpins - kYields) / kPausesPerDoubling, 16);
  const int sleep_us = std::min(kMinSleepUs << doublings, kMaxSleepUs);
  if (sleep_us == kMaxSleepUs) --pauses_;  // stay here, whatever the length of the wait
  std::this_thread::sleep_for(std::chrono::microseconds(sleep_us));
}

namespace counter_internal {

Status WaitSlowly(const Counter& counter, uint64_t target, const WaitContext& context) {
  BackOff back_off;
  while (true) {
    // Looked at before the counter: a counter that arrived in time is never reported as late.
    const bool cancelled =
        context.cancelled != nullptr && context.cancelled->load(std::memory_order_acquire);
    const bool expired = std::chrono::steady_clock::now() >= context.deadline;
    const uint64_t observed = Read(counter);
    if (observed >= target) return OkStatus();
    if (cancelled) return WaitError("cancelled", StatusCode::kAborted, target, observed, context);
    if (expired) {
      return WaitError("timed out", StatusCode::kDeadlineExceeded, target, observed, context);
    }
    back_off.Pause();
  }
}

}  // namespace counter_internal

Status WaitAllAtLeast(const Counter* counters, int64_t num_counters, uint64_t target,
                      const WaitContext& context) {
  for (int64_t i = 0; i < num_counters; ++i) {
    MOK_RETURN_IF_ERROR(WaitAtLeast(counters[i], target, context));
  }
  return OkStatus();
}

}  // namespace mok
