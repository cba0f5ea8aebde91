#include <dirent.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "mok_comm/rendezvous.h"
#include "mok_comm/symmetric_heap.h"
#include "mok_comm/test_processes.h"
#include "mok_core/counter.h"

namespace mok {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

PosixSharedMemoryOptions Options(const std::string& name, int rank, int size, size_t bytes) {
  PosixSharedMemoryOptions options;
  options.name = name;
  options.rank = rank;
  options.size = size;
  options.bytes = bytes;
  return options;
}

// Bounded wait for a counter in the heap: peers signal there.
void WaitFor(const Counter& counter, uint64_t target) {
  WaitContext context;
  context.task = "test";
  context.deadline = steady_clock::now() + seconds(60);
  const Status status = WaitAtLeast(counter, target, context);
  ASSERT_TRUE(status.ok()) << status;
}

// Whether any name on /dev/shm contains `text`.
bool HasSharedMemoryFile(const std::string& text) {
  DIR* directory = opendir("/dev/shm");
  bool found = false;
  while (const dirent* entry = readdir(directory)) {
    found = found || std::string(entry->d_name).find(text) != std::string::npos;
  }
  closedir(directory);
  return found;
}

// Fills the own memory, tells all peers, and reads what they wrote.
void CheckHeap(const SymmetricHeap& heap, size_t bytes) {
  ASSERT_EQ(heap.bytes(), bytes);
  // Peers may have signalled the counter already.
  for (size_t i = sizeof(Counter); i < bytes; ++i) ASSERT_EQ(heap.local()[i], std::byte{0});
  std::memset(heap.local() + sizeof(Counter), heap.rank() + 1, bytes - sizeof(Counter));
  for (int peer = 0; peer < heap.size(); ++peer) {
    Signal(*reinterpret_cast<Counter*>(heap.base(peer)));
  }
  const auto num_ranks = static_cast<uint64_t>(heap.size());
  ASSERT_NO_FATAL_FAILURE(WaitFor(*reinterpret_cast<Counter*>(heap.local()), num_ranks));
  for (int peer = 0; peer < heap.size(); ++peer) {
    EXPECT_EQ(heap.base(peer)[sizeof(Counter)], static_cast<std::byte>(peer + 1));
    EXPECT_EQ(heap.base(peer)[bytes - 1], static_cast<std::byte>(peer + 1));
  }
}

TEST(PosixSharedMemoryHeapTest, ProcessesSeeEachOther) {
  for (const int size : {1, 2, 3, 8}) {
    const std::string name = UniqueGroupName("see");
    const size_t bytes = 300'001;
    EXPECT_TRUE(RunRanks(size, [&](int rank) {
      // Ranks come in any order.
      std::this_thread::sleep_for(milliseconds(7 * ((rank * 5) % size)));
      const auto heap = CreatePosixSharedMemoryHeap(Options(name, rank, size, bytes));
      ASSERT_TRUE(heap.ok()) << heap.status();
      EXPECT_EQ((*heap)->rank(), rank);
      EXPECT_EQ((*heap)->size(), size);
      EXPECT_FALSE(HasSharedMemoryFile(name));
      CheckHeap(**heap, bytes);
    }));
  }
}

TEST(PosixSharedMemoryHeapTest, ThreadsCanBeRanks) {
  const std::string name = UniqueGroupName("threads");
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 4; ++rank) {
    threads.emplace_back([&, rank] {
      const auto heap = CreatePosixSharedMemoryHeap(Options(name, rank, 4, 10'000));
      ASSERT_TRUE(heap.ok()) << heap.status();
      CheckHeap(**heap, 10'000);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The next group of the same name must not meet leftovers of the one before.
TEST(PosixSharedMemoryHeapTest, NameIsFreeAgainAtOnce) {
  const std::string name = UniqueGroupName("again");
  EXPECT_TRUE(RunRanks(3, [&](int rank) {
    for (size_t round = 1; round <= 40; ++round) {
      const size_t bytes = 4096 * round;
      const auto heap = CreatePosixSharedMemoryHeap(Options(name, rank, 3, bytes));
      ASSERT_TRUE(heap.ok()) << "round " << round << " " << heap.status();
      ASSERT_NO_FATAL_FAILURE(CheckHeap(**heap, bytes));
    }
  }));
}

TEST(PosixSharedMemoryHeapTest, RejectsBadOptions) {
  const std::string name = "options";
  const std::vector<std::pair<PosixSharedMemoryOptions, std::string>> cases = {
      {Options("", 0, 1, 1), "name: expected 1 to 64 characters without '/', got 0"},
      {Options(std::string(65, 'x'), 0, 1, 1),
       "name: expected 1 to 64 characters without '/', got 65"},
      {Options("a/b", 0, 1, 1), "name: expected 1 to 64 characters without '/', got 3: \"a/b\""},
      {Options(name, 0, 0, 1), "size is 0, expected >= 1"},
      {Options(name, -1, 2, 1), "rank is -1, expected 0 to 1"},
      {Options(name, 2, 2, 1), "rank is 2, expected 0 to 1"},
      {Options(name, 0, 1, 0), "bytes is 0, expected >= 1"},
  };
  for (const auto& [options, text] : cases) {
    const Status status = CreatePosixSharedMemoryHeap(options).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(text));
  }
}

TEST(PosixSharedMemoryHeapTest, LongestNameWorks) {
  std::string name = UniqueGroupName("long");
  name.resize(64, 'x');
  EXPECT_TRUE(CreatePosixSharedMemoryHeap(Options(name, 0, 1, 1)).ok());
}

TEST(PosixSharedMemoryHeapTest, NamesTheRanksThatDoNotCome) {
  const std::string name = UniqueGroupName("missing");
  EXPECT_TRUE(RunRanks(2, [&](int process) {
    const int rank = 2 * process;  // of 4; ranks 1 and 3 stay away
    PosixSharedMemoryOptions options = Options(name, rank, 4, 4096);
    options.timeout = milliseconds(300);
    const auto begin = steady_clock::now();
    const Status status = CreatePosixSharedMemoryHeap(options).status();
    EXPECT_GE(steady_clock::now() - begin, milliseconds(300));
    EXPECT_LT(steady_clock::now() - begin, seconds(20));
    EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
    EXPECT_THAT(status.message(), AllOf(HasSubstr(StrCat("rank ", rank, " timed out")),
                                        HasSubstr("missing rank 1, 3")));
  }));
}

TEST(PosixSharedMemoryHeapTest, AllRanksReportDifferentBytes) {
  const std::string name = UniqueGroupName("bytes");
  EXPECT_TRUE(RunRanks(3, [&](int rank) {
    const size_t bytes = rank == 1 ? 8192 : 4096;
    const auto begin = steady_clock::now();
    const Status status = CreatePosixSharedMemoryHeap(Options(name, rank, 3, bytes)).status();
    EXPECT_LT(steady_clock::now() - begin, seconds(30));  // not only at the timeout
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("rank 0 asks for 4096, rank 1 for 8192"));
  }));
}

TEST(PosixSharedMemoryHeapTest, AllRanksReportDifferentSizes) {
  const std::string name = UniqueGroupName("sizes");
  EXPECT_TRUE(RunRanks(2, [&](int rank) {
    const auto begin = steady_clock::now();
    const Status status =
        CreatePosixSharedMemoryHeap(Options(name, rank, rank == 0 ? 2 : 3, 4096)).status();
    EXPECT_LT(steady_clock::now() - begin, seconds(30));
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("rank 0 expects 2, rank 1 expects 3"));
  }));
}

TEST(PosixSharedMemoryHeapTest, ExhaustionIsAnErrorWithNumbers) {
  const std::string name = UniqueGroupName("exhausted");
  EXPECT_TRUE(RunRanks(2, [&](int rank) {
    for (const size_t bytes : {size_t{1} << 50, SIZE_MAX}) {
      const Status status = CreatePosixSharedMemoryHeap(Options(name, rank, 2, bytes)).status();
      EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
      EXPECT_THAT(status.message(), AllOf(HasSubstr("rank 0"), HasSubstr("/dev/shm"),
                                          HasSubstr(StrCat("wanted ", bytes, " bytes, available")),
                                          Not(HasSubstr("available 0 bytes"))));
    }
  }));
}

TEST(PosixSharedMemoryHeapTest, OneProcessPerRank) {
  const std::string name = UniqueGroupName("twice");
  const StatusOr<Rendezvous> holder = Rendezvous::Listen(name, 0);
  ASSERT_TRUE(holder.ok());
  EXPECT_TRUE(RunRanks(1, [&](int rank) {
    const Status status = CreatePosixSharedMemoryHeap(Options(name, rank, 2, 4096)).status();
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
    EXPECT_THAT(status.message(), HasSubstr("another live process is rank 0"));
  }));
}

// A rank killed at any moment of the creation: the other one succeeds (it was after the last step)
// or says so in time; nothing stays on /dev/shm, and the name is free.
TEST(PosixSharedMemoryHeapTest, KilledRankLeavesNothingBehind) {
  const std::string name = UniqueGroupName("killed");
  for (int delay_us = 0; delay_us < 6000; delay_us += 200) {
    TestProcess victim([&] {
      const auto heap = CreatePosixSharedMemoryHeap(Options(name, 1, 2, 1 << 20));
      std::this_thread::sleep_for(seconds(60));
    });
    TestProcess survivor([&] {
      PosixSharedMemoryOptions options = Options(name, 0, 2, 1 << 20);
      options.timeout = milliseconds(200);
      const auto begin = steady_clock::now();
      const auto heap = CreatePosixSharedMemoryHeap(options);
      EXPECT_LT(steady_clock::now() - begin, seconds(20));
      if (heap.ok()) {
        // Mapped pages outlive their owner: no SIGBUS.
        std::memset((*heap)->base(1), 1, (*heap)->bytes());
      } else {
        EXPECT_THAT(heap.status().message(),
                    AnyOf(HasSubstr("missing rank 1"), HasSubstr("rank 1 of")));
      }
    });
    std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    victim.Kill();
    EXPECT_TRUE(survivor.Succeeded());
    EXPECT_FALSE(HasSharedMemoryFile(name));
  }
}

// Rank 1 meets rank 0 and dies while both wait for rank 2.
TEST(PosixSharedMemoryHeapTest, NamesARankThatDiedWhileOthersWereAwaited) {
  const std::string name = UniqueGroupName("died");
  TestProcess waiting([&] {
    const Status status = CreatePosixSharedMemoryHeap(Options(name, 0, 3, 4096)).status();
    EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status;
    EXPECT_THAT(status.message(), HasSubstr("rank 1 of"));
    EXPECT_THAT(status.message(), HasSubstr("died"));
  });
  EXPECT_TRUE(RunRanks(1, [&](int) {
    StatusOr<Rendezvous> rendezvous = Rendezvous::Listen(name, 1);
    ASSERT_TRUE(rendezvous.ok()) << rendezvous.status();
    const FileDescriptor memory(memfd_create("victim", MFD_CLOEXEC));
    ASSERT_EQ(ftruncate(memory.get(), 4096), 0);
    const auto deadline = steady_clock::now() + seconds(1);
    const Status status = rendezvous->Meet({1, 3, 4096, OkStatus()}, memory, deadline);
    EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
    EXPECT_EQ(rendezvous->Offers().size(), 2u);
  }));
  EXPECT_TRUE(RunRanks(1, [&](int) {
    PosixSharedMemoryOptions options = Options(name, 2, 3, 4096);
    options.timeout = seconds(2);
    const Status status = CreatePosixSharedMemoryHeap(options).status();
    EXPECT_THAT(status.message(), HasSubstr("missing rank 1")) << status;
  }));
  EXPECT_TRUE(waiting.Succeeded());
}

}  // namespace
}  // namespace mok
