#include "mok_core/work_source.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace mok {
namespace {

// A worker of any kind: it knows the concept only.
template <WorkSource Source>
std::vector<int64_t> Drain(Source& source) {
  std::vector<int64_t> tasks;
  for (int64_t task; source.Next(task);) tasks.push_back(task);
  return tasks;
}

TEST(ThreadWorkSourceTest, HandsOutAscendingIndices) {
  ThreadWorkSource source(5);
  EXPECT_EQ(source.num_tasks(), 5);
  EXPECT_EQ(Drain(source), (std::vector<int64_t>{0, 1, 2, 3, 4}));
}

TEST(ThreadWorkSourceTest, StaysEmpty) {
  ThreadWorkSource none(0);
  ThreadWorkSource one(1);
  int64_t task = -1;
  EXPECT_TRUE(one.Next(task));
  for (int i = 0; i < 1000; ++i) {
    EXPECT_FALSE(none.Next(task));
    EXPECT_FALSE(one.Next(task));
  }
}

TEST(ThreadWorkSourceTest, EveryTaskExactlyOnceUnderManyThreads) {
  constexpr int kThreads = 16;
  for (const int64_t num_tasks : {1, 15, 1000, 100'000, 1'000'000}) {
    ThreadWorkSource source(num_tasks);
    std::vector<std::atomic<int>> claims(static_cast<size_t>(num_tasks));
    std::atomic<int> out_of_order{0};
    std::atomic<bool> go{false};  // all start at once, or the first would take everything
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&] {
        go.wait(false);
        int64_t previous = -1;
        for (int64_t task; source.Next(task); previous = task) {
          if (task <= previous) out_of_order.fetch_add(1);
          claims[static_cast<size_t>(task)].fetch_add(1);
        }
      });
    }
    go.store(true);
    go.notify_all();
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(out_of_order.load(), 0);
    for (const std::atomic<int>& count : claims) ASSERT_EQ(count.load(), 1);
  }
}

}  // namespace
}  // namespace mok
