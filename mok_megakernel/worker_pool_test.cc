#include "mok_megakernel/worker_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace mok {
namespace {

TEST(WorkerPoolTest, EveryWorkerRunsOnce) {
  WorkerPool pool;
  ASSERT_TRUE(pool.Reserve(5).ok());
  EXPECT_EQ(pool.num_threads(), 4);
  for (int round = 0; round < 500; ++round) {
    const int num_workers = 1 + round % 5;
    std::vector<std::atomic<int>> calls(5);
    pool.Run(num_workers, WorkerPool::Latecomers::kAwait,
             [&](int worker) { calls[static_cast<size_t>(worker)].fetch_add(1); });
    for (int worker = 0; worker < 5; ++worker) {
      EXPECT_EQ(calls[static_cast<size_t>(worker)].load(), worker < num_workers ? 1 : 0);
    }
  }
}

// Skipping must neither lose a worker that has begun nor let one begin after Run has returned.
TEST(WorkerPoolTest, SkippedWorkersDoNotComeLate) {
  WorkerPool pool;
  ASSERT_TRUE(pool.Reserve(4).ok());
  for (int round = 0; round < 2000; ++round) {
    std::atomic<int> begun{0};
    std::atomic<int> ended{0};
    pool.Run(4, WorkerPool::Latecomers::kSkip, [&](int worker) {
      begun.fetch_add(1);
      if (worker == 0 && round % 3 == 0) std::this_thread::yield();
      ended.fetch_add(1);
    });
    EXPECT_EQ(begun.load(), ended.load());
    EXPECT_GE(begun.load(), 1);
    EXPECT_LE(begun.load(), 4);
  }
}

TEST(WorkerPoolTest, WorkersSleepBetweenRunsAndWakeUp) {
  WorkerPool pool;
  ASSERT_TRUE(pool.Reserve(3).ok());
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::atomic<int> calls{0};
    pool.Run(3, WorkerPool::Latecomers::kAwait, [&](int) { calls.fetch_add(1); });
    EXPECT_EQ(calls.load(), 3);
  }
}

TEST(WorkerPoolTest, UnusedPoolEnds) {
  WorkerPool pool;
  ASSERT_TRUE(pool.Reserve(8).ok());
}

}  // namespace
}  // namespace mok
