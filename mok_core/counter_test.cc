#include "mok_core/counter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <thread>
#include <vector>

namespace mok {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::HasSubstr;

WaitContext ContextFor(milliseconds timeout) {
  WaitContext context;
  context.rank = 3;
  context.task = "GateUp";
  context.task_index = 41;
  context.deadline = steady_clock::now() + timeout;
  return context;
}

TEST(CounterTest, ZeroedMemoryIsACounterAtZero) {
  alignas(Counter) std::byte memory[sizeof(Counter)] = {};
  auto* counter = reinterpret_cast<Counter*>(memory);
  EXPECT_EQ(Read(*counter), 0u);
  Signal(*counter);
  Signal(*counter, 41);
  EXPECT_EQ(Read(*counter), 42u);
  static_assert(sizeof(Counter) == 64 && alignof(Counter) == 64);
}

TEST(CounterTest, ReachedTargetWinsOverDeadlineAndCancel) {
  Counter counter;
  Signal(counter, 7);
  std::atomic<bool> cancelled{true};
  WaitContext context = ContextFor(seconds(-1));
  context.cancelled = &cancelled;
  EXPECT_TRUE(WaitAtLeast(counter, 7, context).ok());
  EXPECT_TRUE(WaitAtLeast(counter, 0, context).ok());
}

TEST(CounterTest, TimeoutNamesEverything) {
  Counter counter;
  Signal(counter, 2);
  const auto begin = steady_clock::now();
  const Status status = WaitAtLeast(counter, 5, ContextFor(milliseconds(50)));
  EXPECT_GE(steady_clock::now() - begin, milliseconds(50));
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
  EXPECT_THAT(status.message(),
              AllOf(HasSubstr("rank 3"), HasSubstr("GateUp 41"), HasSubstr("timed out"),
                    HasSubstr("expected >= 5"), HasSubstr("observed 2")));
}

TEST(CounterTest, CancelEndsAWaitEarly) {
  Counter counter;
  std::atomic<bool> cancelled{false};
  WaitContext context = ContextFor(seconds(60));
  context.cancelled = &cancelled;
  std::thread canceller([&] {
    std::this_thread::sleep_for(milliseconds(20));
    cancelled.store(true);
  });
  const auto begin = steady_clock::now();
  const Status status = WaitAtLeast(counter, 1, context);
  canceller.join();
  EXPECT_LT(steady_clock::now() - begin, seconds(30));
  EXPECT_EQ(status.code(), StatusCode::kAborted);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("rank 3"), HasSubstr("cancelled"),
                                      HasSubstr("expected >= 1"), HasSubstr("observed 0")));
}

TEST(CounterTest, WaitAllNamesTheFirstThatIsLate) {
  Counter counters[4];
  for (Counter& counter : counters) Signal(counter, 9);
  EXPECT_TRUE(WaitAllAtLeast(counters, 4, 9, ContextFor(seconds(0))).ok());
  EXPECT_TRUE(WaitAllAtLeast(counters, 0, 100, ContextFor(seconds(0))).ok());
  Signal(counters[0]);
  Signal(counters[1]);
  Signal(counters[3]);
  const Status status = WaitAllAtLeast(counters, 4, 10, ContextFor(milliseconds(1)));
  EXPECT_THAT(status.message(), HasSubstr("observed 9"));
}

// Plain data written before Signal is visible after the wait (tsan checks the order, too).
TEST(CounterTest, SignalPublishesPlainWrites) {
  constexpr int kRounds = 2000;
  std::vector<int> data(kRounds, 0);
  Counter produced;
  std::thread producer([&] {
    for (int round = 0; round < kRounds; ++round) {
      data[static_cast<size_t>(round)] = round + 1;
      Signal(produced);
    }
  });
  for (int round = 0; round < kRounds; ++round) {
    ASSERT_TRUE(
        WaitAtLeast(produced, static_cast<uint64_t>(round) + 1, ContextFor(seconds(60))).ok());
    ASSERT_EQ(data[static_cast<size_t>(round)], round + 1);
  }
  producer.join();
}

// A token travels around a ring of 16 threads, most of which wait at any time, on few cores.
TEST(CounterTest, ManyWaitersOnFewCores) {
  constexpr int kThreads = 16;
  constexpr int kLaps = 200;
  std::vector<Counter> turns(kThreads);
  int64_t token = 0;
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      for (uint64_t lap = 0; lap < kLaps; ++lap) {
        const auto own = static_cast<size_t>(i);
        if (!WaitAtLeast(turns[own], lap + 1, ContextFor(seconds(60))).ok()) {
          failures.fetch_add(1);
          return;
        }
        ++token;
        Signal(turns[(own + 1) % kThreads]);
      }
    });
  }
  Signal(turns[0]);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures.load(), 0);
  EXPECT_EQ(token, int64_t{kThreads} * kLaps);
}

TEST(CounterTest, ManySignallersAddUp) {
  constexpr int kThreads = 8;
  constexpr int kSignals = 5000;
  Counter counter;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int signal = 0; signal < kSignals; ++signal) Signal(counter);
    });
  }
  EXPECT_TRUE(WaitAtLeast(counter, kThreads * kSignals, ContextFor(seconds(60))).ok());
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Read(counter), static_cast<uint64_t>(kThreads * kSignals));
}

// Two processes, one page: ping and pong with a payload.
TEST(CounterTest, WorksAcrossProcessesInSharedMemory) {
  struct Shared {
    Counter ping;
    Counter pong;
    int64_t payload = 0;
  };
  void* page =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(page, MAP_FAILED);
  auto* shared = static_cast<Shared*>(page);
  constexpr uint64_t kRounds = 500;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    for (uint64_t round = 1; round <= kRounds; ++round) {
      if (!WaitAtLeast(shared->ping, round, ContextFor(seconds(60))).ok()) _exit(1);
      shared->payload *= 2;
      Signal(shared->pong);
    }
    _exit(0);
  }
  for (uint64_t round = 1; round <= kRounds; ++round) {
    shared->payload = static_cast<int64_t>(round);
    Signal(shared->ping);
    ASSERT_TRUE(WaitAtLeast(shared->pong, round, ContextFor(seconds(60))).ok());
    ASSERT_EQ(shared->payload, static_cast<int64_t>(2 * round));
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  munmap(page, sizeof(Shared));
}

// A waiter that has reached its longest sleep must not burn a core.
TEST(BackOffTest, LongWaitsSleep) {
  BackOff back_off;
  timespec cpu_begin;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu_begin);
  const auto begin = steady_clock::now();
  while (steady_clock::now() - begin < milliseconds(200)) back_off.Pause();
  timespec cpu_end;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu_end);
  const double cpu_seconds = static_cast<double>(cpu_end.tv_sec - cpu_begin.tv_sec) +
                             1e-9 * static_cast<double>(cpu_end.tv_nsec - cpu_begin.tv_nsec);
  EXPECT_LT(cpu_seconds, 0.1);
}

}  // namespace
}  // namespace mok
