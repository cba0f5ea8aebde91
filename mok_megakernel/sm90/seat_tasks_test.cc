#include "mok_megakernel/sm90/seat_tasks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace mok {
namespace {

// How many warps have each task of a queue, and how many of those joined for the tail.
struct Shares {
  std::vector<int> warps, joined;
};

Shares CountShares(int64_t count, int64_t tail, int32_t step) {
  Shares shares = {std::vector<int>(count), std::vector<int>(count)};
  for (int32_t first = 0; first < step; ++first) {
    for (const int32_t half : {0, 1}) {
      const SeatTasks tasks = {first, step, half, tail, count};
      int64_t last = -1;
      for (int64_t n = tasks.begin(); tasks.At(n) < count; ++n) {
        const int64_t index = tasks.At(n);
        EXPECT_GT(index, last);
        last = index;
        ++shares.warps[index];
        shares.joined[index] += half;
      }
    }
  }
  return shares;
}

TEST(SeatTasksTest, EveryTaskHasOneWarp) {
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    const auto step = static_cast<int32_t>(1 + random() % 140);
    const int64_t count = random() % 1000, most = std::min<int64_t>(random() % 400, count);
    for (const int64_t tail : {TailOfQueue(count, most, step), NoTailOfQueue(count, step)}) {
      const Shares shares = CountShares(count, tail, step);
      EXPECT_TRUE(std::all_of(shares.warps.begin(), shares.warps.end(),
                              [](int warps) { return warps == 1; }))
          << count << " tasks, tail " << tail << ", step " << step;
    }
  }
}

TEST(SeatTasksTest, OnlyTheLastTasksAreShared) {
  std::mt19937 random(2);
  for (int i = 0; i < 2000; ++i) {
    const auto step = static_cast<int32_t>(1 + random() % 140);
    const int64_t count = random() % 1000, most = std::min<int64_t>(random() % 400, count);
    const Shares shares = CountShares(count, TailOfQueue(count, most, step), step);
    for (int64_t index = 0; index < count - most; ++index) EXPECT_EQ(shares.joined[index], 0);
    const Shares alone = CountShares(count, NoTailOfQueue(count, step), step);
    EXPECT_EQ(std::count(alone.joined.begin(), alone.joined.end(), 1), 0);
  }
}

TEST(SeatTasksTest, TwoRoundsAreSharedEvenly) {
  constexpr int32_t kStep = 132;
  const Shares shares = CountShares(10 * kStep, TailOfQueue(10 * kStep, 1000, kStep), kStep);
  EXPECT_EQ(std::count(shares.joined.begin(), shares.joined.end(), 1), kStep);
  EXPECT_TRUE(std::all_of(shares.joined.end() - kStep, shares.joined.end(),
                          [](int joined) { return joined == 1; }));
}

}  // namespace
}  // namespace mok
