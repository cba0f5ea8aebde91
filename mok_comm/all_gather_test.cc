#include "mok_comm/all_gather.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <vector>

#include "mok_comm/rank_barrier.h"
#include "mok_comm/test_processes.h"

namespace mok {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kMaxTokens = 20;

int32_t ExpertOf(int rank, int64_t index, uint64_t round) {
  if (index % 7 == 3) return -1;
  return static_cast<int32_t>(1000 * round + 100 * static_cast<uint64_t>(rank) +
                              static_cast<uint64_t>(index));
}

int64_t TokensOf(int rank, uint64_t round) {
  return (5 * rank + 3 * static_cast<int64_t>(round)) % (kMaxTokens + 1);  // from 0 to the largest
}

struct Layout {
  explicit Layout(int size, int topk) {
    HeapLayout layout;
    barrier = layout.Reserve(RankBarrier::RegionBytes(size));
    routes = layout.Reserve(RouteAllGather::RegionBytes(kMaxTokens, topk));
    bytes = layout.bytes();
  }
  size_t barrier;
  size_t routes;
  size_t bytes;
};

// Rounds of all-gather with one barrier each; token counts change from round to round.
template <class Integer>
void GatherRounds(const SymmetricHeap& heap, int topk, uint64_t rounds) {
  const Layout layout(heap.size(), topk);
  RankBarrier barrier(heap, layout.barrier);
  RouteAllGather gather(heap, layout.routes, kMaxTokens, topk);
  for (uint64_t round = 0; round < rounds; ++round) {
    const int64_t num_tokens = TokensOf(heap.rank(), round);
    std::vector<Integer> ids;
    for (int64_t i = 0; i < num_tokens * topk; ++i) ids.push_back(ExpertOf(heap.rank(), i, round));
    ASSERT_TRUE(gather.Publish(ids.data(), num_tokens).ok());
    WaitContext context;
    context.deadline = steady_clock::now() + seconds(60);
    const Status status = barrier.ArriveAndWait(context);
    ASSERT_TRUE(status.ok()) << status;
    const StatusOr<GatheredRoutes> routes = gather.Gather();
    ASSERT_TRUE(routes.ok()) << routes.status();
    ASSERT_EQ(routes->topk, topk);
    ASSERT_EQ(routes->num_tokens.size(), static_cast<size_t>(heap.size()));
    int64_t total = 0;
    for (int peer = 0; peer < heap.size(); ++peer) {
      ASSERT_EQ(routes->num_tokens[static_cast<size_t>(peer)], TokensOf(peer, round));
      ASSERT_EQ(routes->first_token[static_cast<size_t>(peer)], total);
      total += TokensOf(peer, round);
      for (int64_t i = 0; i < TokensOf(peer, round) * topk; ++i) {
        ASSERT_EQ(routes->Rank(peer)[i], ExpertOf(peer, i, round));
      }
    }
    ASSERT_EQ(routes->first_token.back(), total);
    ASSERT_EQ(static_cast<int64_t>(routes->expert_ids.size()), total * topk);
  }
}

TEST(RouteAllGatherTest, Threads) {
  for (const int size : {1, 2, 3, 8}) {
    for (const int topk : {1, 6}) {
      RunThreadsOnHeap(size, Layout(size, topk).bytes,
                       [&](const SymmetricHeap& heap) { GatherRounds<int32_t>(heap, topk, 50); });
    }
  }
}

TEST(RouteAllGatherTest, Processes) {
  EXPECT_TRUE(RunProcessesOnHeap("gather", 3, Layout(3, 4).bytes, [](const SymmetricHeap& heap) {
    GatherRounds<int64_t>(heap, 4, 100);
  }));
}

TEST(RouteAllGatherTest, NoTokensAnywhere) {
  const auto heaps = std::move(CreateInProcessHeaps(2, Layout(2, 3).bytes)).value();
  std::vector<RouteAllGather> gathers;
  for (const auto& heap : heaps) {
    gathers.emplace_back(*heap, Layout(2, 3).routes, kMaxTokens, 3);
    ASSERT_TRUE(gathers.back().Publish(static_cast<const int64_t*>(nullptr), 0).ok());
  }
  const StatusOr<GatheredRoutes> routes = gathers[0].Gather();
  ASSERT_TRUE(routes.ok());
  EXPECT_EQ(routes->num_tokens, (std::vector<int64_t>{0, 0}));
  EXPECT_TRUE(routes->expert_ids.empty());
}

TEST(RouteAllGatherTest, RejectsWhatDoesNotFit) {
  const auto heaps = std::move(CreateInProcessHeaps(2, Layout(2, 2).bytes)).value();
  RouteAllGather gather(*heaps[1], Layout(2, 2).routes, kMaxTokens, 2);
  const std::vector<int64_t> ids = {0, 1, 2, int64_t{1} << 40, -3, 5};
  const Status large = gather.Publish(ids.data(), 3);
  EXPECT_EQ(large.code(), StatusCode::kOutOfRange);
  EXPECT_THAT(large.message(), HasSubstr("rank 1, token 1, k 1: expert id 1099511627776"));
  for (const int64_t num_tokens : {int64_t{-1}, kMaxTokens + 1}) {
    const Status status = gather.Publish(ids.data(), num_tokens);
    EXPECT_EQ(status.code(), StatusCode::kOutOfRange);
    EXPECT_THAT(status.message(), AllOf(HasSubstr("rank 1"), HasSubstr(StrCat(num_tokens)),
                                        HasSubstr("expected 0 to 20")));
  }
}

// A peer with memory gone bad is named; nothing is read outside its region.
TEST(RouteAllGatherTest, ReportsAnImpossibleTokenCount) {
  const auto heaps = std::move(CreateInProcessHeaps(2, Layout(2, 2).bytes)).value();
  RouteAllGather gather(*heaps[0], Layout(2, 2).routes, kMaxTokens, 2);
  for (const int64_t num_tokens : {kMaxTokens + 1, int64_t{-1}, INT64_MAX}) {
    std::memcpy(heaps[1]->local() + Layout(2, 2).routes, &num_tokens, sizeof(num_tokens));
    const Status status = gather.Gather().status();
    EXPECT_EQ(status.code(), StatusCode::kOutOfRange);
    EXPECT_THAT(status.message(), HasSubstr(StrCat("rank 1 published ", num_tokens)));
  }
}

}  // namespace
}  // namespace mok
