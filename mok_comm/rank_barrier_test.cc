#include "mok_comm/rank_barrier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "mok_comm/test_processes.h"

namespace mok {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

WaitContext ContextFor(int rank, milliseconds timeout = seconds(60)) {
  WaitContext context;
  context.rank = rank;
  context.task = "EntryBarrier";
  context.task_index = 12;
  context.deadline = steady_clock::now() + timeout;
  return context;
}

std::vector<std::unique_ptr<SymmetricHeap>> Heaps(int size, size_t bytes) {
  return std::move(CreateInProcessHeaps(size, bytes)).value();
}

// Each round every rank writes into every rank's memory, and finds everybody's value there after
// the barrier; a second barrier protects the values until all have read them.
void ExchangeThroughMemory(const SymmetricHeap& heap, uint64_t rounds) {
  RankBarrier barrier(heap, 0);
  const size_t values_offset = RankBarrier::RegionBytes(heap.size());
  for (uint64_t round = 1; round <= rounds; ++round) {
    for (int peer = 0; peer < heap.size(); ++peer) {
      auto* values = reinterpret_cast<uint64_t*>(heap.base(peer) + values_offset);
      values[heap.rank()] = 1000 * round + static_cast<uint64_t>(heap.rank());
    }
    Status status = barrier.ArriveAndWait(ContextFor(heap.rank()));
    ASSERT_TRUE(status.ok()) << status;
    const auto* values = reinterpret_cast<const uint64_t*>(heap.local() + values_offset);
    for (int peer = 0; peer < heap.size(); ++peer) {
      ASSERT_EQ(values[peer], 1000 * round + static_cast<uint64_t>(peer));
    }
    status = barrier.ArriveAndWait(ContextFor(heap.rank()));
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(barrier.epoch(), 2 * round);
  }
}

TEST(RankBarrierTest, OrdersWritesOfThreads) {
  for (const int size : {1, 2, 5, 16}) {
    RunThreadsOnHeap(size, 4096,
                     [](const SymmetricHeap& heap) { ExchangeThroughMemory(heap, 100); });
  }
}

TEST(RankBarrierTest, OrdersWritesOfProcesses) {
  EXPECT_TRUE(RunProcessesOnHeap(
      "barrier", 4, 4096, [](const SymmetricHeap& heap) { ExchangeThroughMemory(heap, 300); }));
}

TEST(RankBarrierTest, SplitBarrierNeverBlocksOnArrival) {
  const auto heaps = Heaps(2, 4096);
  RankBarrier first(*heaps[0], 128);
  RankBarrier second(*heaps[1], 128);
  ASSERT_TRUE(first.Arrive().ok());
  ASSERT_TRUE(second.Arrive().ok());
  EXPECT_TRUE(first.Wait(ContextFor(0)).ok());
  // A fast rank may arrive at the next one while the other has not waited yet.
  ASSERT_TRUE(first.Arrive().ok());
  EXPECT_TRUE(second.Wait(ContextFor(1)).ok());
  ASSERT_TRUE(second.Arrive().ok());
  EXPECT_TRUE(second.Wait(ContextFor(1)).ok());
  EXPECT_TRUE(first.Wait(ContextFor(0)).ok());
}

TEST(RankBarrierTest, RejectsCallsOutOfOrder) {
  const auto heaps = Heaps(1, 4096);
  RankBarrier barrier(*heaps[0], 0);
  EXPECT_EQ(barrier.Wait(ContextFor(0)).code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(barrier.Arrive().ok());
  EXPECT_EQ(barrier.Arrive().code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(barrier.Wait(ContextFor(0)).ok());
  EXPECT_EQ(barrier.Wait(ContextFor(0)).code(), StatusCode::kFailedPrecondition);
}

TEST(RankBarrierTest, TimeoutNamesEveryMissingRankAndCanBeRepeated) {
  const auto heaps = Heaps(4, 4096);
  std::vector<RankBarrier> barriers;
  for (const auto& heap : heaps) barriers.emplace_back(*heap, 0);
  for (RankBarrier& barrier : barriers) ASSERT_TRUE(barrier.Arrive().ok());
  for (int rank = 0; rank < 4; ++rank) {
    ASSERT_TRUE(barriers[static_cast<size_t>(rank)].Wait(ContextFor(rank)).ok());
  }
  ASSERT_TRUE(barriers[2].Arrive().ok());
  const Status status = barriers[0].ArriveAndWait(ContextFor(0, milliseconds(30)));
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("rank 0, task EntryBarrier 12: timed out"),
                                      HasSubstr("expected epoch 2"),
                                      HasSubstr("missing rank 1 (observed epoch 1), "
                                                "rank 3 (observed epoch 1)"),
                                      Not(HasSubstr("rank 2"))));
  ASSERT_TRUE(barriers[1].Arrive().ok());
  ASSERT_TRUE(barriers[3].Arrive().ok());
  EXPECT_TRUE(barriers[0].Wait(ContextFor(0, milliseconds(0))).ok());
}

TEST(RankBarrierTest, CancelEndsTheWait) {
  const auto heaps = Heaps(2, 4096);
  RankBarrier barrier(*heaps[0], 0);
  std::atomic<bool> cancelled{false};
  WaitContext context = ContextFor(0);
  context.cancelled = &cancelled;
  std::thread canceller([&] {
    std::this_thread::sleep_for(milliseconds(10));
    cancelled.store(true);
  });
  const Status status = barrier.ArriveAndWait(context);
  canceller.join();
  EXPECT_EQ(status.code(), StatusCode::kAborted);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("cancelled"), HasSubstr("missing rank 1")));
}

TEST(RankBarrierTest, KilledRankIsNamedByTheOthers) {
  const std::string name = UniqueGroupName("killed");
  std::vector<TestProcess> processes;
  for (int rank = 0; rank < 3; ++rank) {
    processes.emplace_back([&, rank] {
      PosixSharedMemoryOptions options{name, rank, 3, 4096, seconds(60)};
      const auto heap = CreatePosixSharedMemoryHeap(options);
      ASSERT_TRUE(heap.ok()) << heap.status();
      RankBarrier barrier(**heap, 0);
      for (int round = 0; round < 20; ++round) {
        ASSERT_TRUE(barrier.ArriveAndWait(ContextFor(rank)).ok());
      }
      if (rank == 1) raise(SIGKILL);
      const auto begin = steady_clock::now();
      const Status status = barrier.ArriveAndWait(ContextFor(rank, milliseconds(500)));
      EXPECT_LT(steady_clock::now() - begin, seconds(20));
      EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
      EXPECT_THAT(status.message(), HasSubstr("missing rank 1 (observed epoch 20)"));
    });
  }
  EXPECT_TRUE(processes[0].Succeeded());
  EXPECT_FALSE(processes[1].Succeeded());
  EXPECT_TRUE(processes[2].Succeeded());
}

struct Record {
  int64_t rank = 0;
  uint64_t round = 0;
  char text[100] = {};
};

// One barrier per round: two slots keep a fast rank from overwriting what a slow one still reads.
void ExchangeRecords(const SymmetricHeap& heap, uint64_t rounds) {
  const size_t messages_offset = RankBarrier::RegionBytes(heap.size());
  RankBarrier barrier(heap, 0);
  RankMessage message(heap, messages_offset, sizeof(Record));
  for (uint64_t round = 1; round <= rounds; ++round) {
    Record own{heap.rank(), round, "hello"};
    message.Publish(std::as_bytes(std::span(&own, 1)));
    const Status status = barrier.ArriveAndWait(ContextFor(heap.rank()));
    ASSERT_TRUE(status.ok()) << status;
    for (int peer = 0; peer < heap.size(); ++peer) {
      Record record;
      ASSERT_EQ(message.Read(peer).size(), sizeof(Record));
      std::memcpy(&record, message.Read(peer).data(), sizeof(Record));
      ASSERT_EQ(record.rank, peer);
      ASSERT_EQ(record.round, round);
      ASSERT_STREQ(record.text, "hello");
    }
  }
}

TEST(RankMessageTest, OneBarrierPerRoundIsEnoughForThreads) {
  for (const int size : {1, 2, 8}) {
    RunThreadsOnHeap(size, 8192, [](const SymmetricHeap& heap) { ExchangeRecords(heap, 300); });
  }
}

TEST(RankMessageTest, OneBarrierPerRoundIsEnoughForProcesses) {
  EXPECT_TRUE(RunProcessesOnHeap("message", 3, 8192,
                                 [](const SymmetricHeap& heap) { ExchangeRecords(heap, 500); }));
}

TEST(RankMessageTest, ShortRecordsArePaddedWithZeros) {
  const auto heaps = Heaps(1, 4096);
  RankMessage message(*heaps[0], 64, 10);
  const std::vector<std::byte> longest(10, std::byte{0xFF});
  for (const size_t length : {size_t{10}, size_t{10}, size_t{3}, size_t{0}}) {
    message.Publish(std::span(longest).first(length));
    const auto record = message.Read(0);
    ASSERT_EQ(record.size(), 10u);
    for (size_t i = 0; i < 10; ++i) {
      EXPECT_EQ(record[i], i < length ? std::byte{0xFF} : std::byte{0});
    }
  }
}

TEST(RankBarrierDeathTest, RegionsMustFitTheHeap) {
  const auto heaps = Heaps(2, 256);
  EXPECT_DEATH(RankBarrier(*heaps[0], 32), "barrier region at byte 32");
  EXPECT_DEATH(RankBarrier(*heaps[0], 192), "ends outside a heap of 256");
  EXPECT_DEATH(RankMessage(*heaps[0], 8, 8), "message region at byte 8");
  EXPECT_DEATH(RankMessage(*heaps[0], 64, 100), "ends outside a heap of 256");
}

}  // namespace
}  // namespace mok
