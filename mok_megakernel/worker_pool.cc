#include "mok_megakernel/worker_pool.h"

#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>

#include "mok_core/macros.h"

namespace mok {
namespace {

// About 10 to 20 microseconds: a fraction of what waking a sleeping thread costs.
constexpr int kSpins = 400;

void CpuRelax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns the new value once `state` differs from `old`: spins, then sleeps in the kernel.
uint32_t AwaitChange(const std::atomic<uint32_t>& state, uint32_t old) {
  for (int spin = 0; spin < kSpins; ++spin) {
    const uint32_t value = state.load(std::memory_order_acquire);
    if (value != old) return value;
    CpuRelax();
  }
  state.wait(old, std::memory_order_acquire);
  return state.load(std::memory_order_acquire);
}

}  // namespace

// The caller posts; the thread turns kPosted into kRunning unless the caller has taken it back, and
// kRunning into kIdle. `body` is written before kPosted and read after the claim.
struct WorkerPool::Thread {
  enum State : uint32_t { kIdle, kPosted, kRunning, kStop };

  alignas(kCacheLineBytes) std::atomic<uint32_t> state{kIdle};
  const std::function<void(int)>* body = nullptr;
  int worker = 0;
  std::thread thread;

  void Loop() {
    while (true) {
      const uint32_t seen = AwaitChange(state, kIdle);
      if (seen == kStop) return;
      uint32_t posted = kPosted;
      if (!state.compare_exchange_strong(posted, kRunning, std::memory_order_acquire)) continue;
      (*body)(worker);
      state.store(kIdle, std::memory_order_release);
      state.notify_one();
    }
  }

  void Set(State next) {
    state.store(next, std::memory_order_release);
    state.notify_one();
  }

  void Finish(Latecomers latecomers) {
    uint32_t seen = kPosted;
    if (latecomers == Latecomers::kSkip &&
        state.compare_exchange_strong(seen, kIdle, std::memory_order_acquire)) {
      return;
    }
    seen = state.load(std::memory_order_acquire);
    while (seen != kIdle) seen = AwaitChange(state, seen);
  }
};

WorkerPool::WorkerPool() = default;

WorkerPool::~WorkerPool() {
  for (auto& thread : threads_) thread->Set(Thread::kStop);
  for (auto& thread : threads_) thread->thread.join();
}

Status WorkerPool::Reserve(int num_workers) {
  while (num_threads() < num_workers - 1) {
    auto thread = std::make_unique<Thread>();
    thread->worker = num_threads() + 1;
    threads_.reserve(threads_.size() + 1);  // nothing may fail once the thread runs
    try {
      thread->thread = std::thread(&Thread::Loop, thread.get());
    } catch (const std::system_error& error) {
      return ResourceExhaustedError("cannot start worker thread ", num_threads() + 1, " of ",
                                    num_workers - 1, ": ", error.what());
    }
    threads_.push_back(std::move(thread));
  }
  return OkStatus();
}

void WorkerPool::Run(int num_workers, Latecomers latecomers,
                     const std::function<void(int worker)>& body) {
  MOK_CHECK(num_workers >= 1 && num_workers <= num_threads() + 1)
      << num_workers << " workers of " << num_threads() + 1;
  for (int i = 0; i < num_workers - 1; ++i) {
    threads_[static_cast<size_t>(i)]->body = &body;
    threads_[static_cast<size_t>(i)]->Set(Thread::kPosted);
  }
  body(0);
  for (int i = 0; i < num_workers - 1; ++i) threads_[static_cast<size_t>(i)]->Finish(latecomers);
}

}  // namespace mok
