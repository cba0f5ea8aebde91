// Two GPUs, peer memory, memory scopes, and a peer that never comes.
#include "mok_core/emulator/tests/exchange_sm90.h"

#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_core/emulator/tests/test_support.h"

namespace mok::testing {
namespace {

namespace ex = exchange;

constexpr int kWords = ex::kRows * ex::kRowWords;

struct Rank {
  ex::Params params{};
  DeviceWaitRecord* record = nullptr;
  int device = 0;
};

ex::RankMemory MakeRankMemory(int device) {
  ex::RankMemory memory{};
  memory.x = UninitializedArray<float>(kWords, "x", device);
  memory.returned = UninitializedArray<float>(kWords, "returned", device);
  memory.entry = DeviceArray(std::vector<uint64_t>{0}, "entry", device);
  memory.exit = DeviceArray(std::vector<uint64_t>{0}, "exit", device);
  return memory;
}

// Rank r on devices[r].
std::vector<Rank> MakeRanks(bool map_peers, const std::vector<int>& devices = {0, 1}) {
  const ex::RankMemory memory[] = {MakeRankMemory(devices[0]), MakeRankMemory(devices[1])};
  std::vector<Rank> ranks(2);
  for (int r = 0; r < 2; ++r) {
    if (map_peers) MOK_CHECK(runtime::EnablePeerAccess(devices[r], devices[1 - r]).ok());
    ex::Params& p = ranks[r].params;
    p.own = memory[r];
    p.peer = memory[1 - r];
    p.ring = UninitializedArray<float>(kWords, "ring", devices[r]);
    p.ring_filled = DeviceArray(std::vector<uint64_t>{0}, "ring_filled", devices[r]);
    p.sums = UninitializedArray<float>(ex::kRowWords, "sums", devices[r]);
    ranks[r].record = static_cast<DeviceWaitRecord*>(
        runtime::AllocateMappedHost(sizeof(DeviceWaitRecord), "wait_record").value());
    uint32_t* abort_flag = DeviceArray(std::vector<uint32_t>{0}, "abort", devices[r]);
    ranks[r].device = devices[r];
    p.wait = {ranks[r].record, abort_flag, 1'000'000'000, r};
  }
  return ranks;
}

Status LaunchRank(const Rank& rank, int bug) {
  void* stream = runtime::CreateStream(rank.device).value();
  return Launch(ex::ExchangeKernel(bug), rank.params,
                {.blocks = ex::kBlocks,
                 .device = rank.device,
                 .stream = stream,
                 .name = rank.params.wait.rank == 0 ? "rank0" : "rank1"});
}

// Rank r gets its own x back.
bool Matches(const std::vector<Rank>& ranks) {
  for (int r = 0; r < 2; ++r) {
    const auto sums = HostCopy(ranks[r].params.sums, ex::kRowWords);
    for (int column = 0; column < ex::kRowWords; ++column) {
      float want = 0;
      for (int row = 0; row < ex::kRows; ++row) {
        want += static_cast<float>(r * 1000 + row * ex::kRowWords + column);
      }
      if (sums[column] != want) return false;
    }
  }
  return true;
}

Outcome RunVariant(int bug, const Interleaving& interleaving) {
  StartCase(interleaving);
  const std::vector<Rank> ranks = MakeRanks(bug != ex::kPeerNotMapped);
  for (const Rank& rank : ranks) MOK_CHECK(LaunchRank(rank, bug).ok());
  return RunAndCompare([&] { return Matches(ranks); });
}

TEST(ExchangeSm90Test, EveryPlantedBugIsFlagged) {
  ExpectEveryBugFlagged(RunVariant, ex::kBugCount);
}

TEST(ExchangeSm90Test, TwoRanksOnOneDevice) {
  for (const Interleaving& interleaving : kInterleavings) {
    StartCase(interleaving);
    const std::vector<Rank> ranks = MakeRanks(true, {0, 0});
    for (const Rank& rank : ranks) MOK_CHECK(LaunchRank(rank, ex::kCorrect).ok());
    const Outcome outcome = RunAndCompare([&] { return Matches(ranks); });
    EXPECT_EQ(outcome.kind, "ok") << outcome.text;
  }
}

TEST(ExchangeSm90Test, ReportsNameTheReason) {
  const struct {
    int bug;
    const char* kind;
  } kExpected[] = {{ex::kEntryReleaseGpuScope, "scope"},
                   {ex::kEntryAcquireGpuScope, "scope"},
                   {ex::kEntryFenceGpuScope, "race"},
                   {ex::kNoProxyFenceAfterEntry, "proxy-fence"},
                   {ex::kNoProxyFenceAfterRing, "proxy-fence"},
                   {ex::kExitReleaseGpuScope, "scope"},
                   {ex::kPeerNotMapped, "peer"},
                   {ex::kPullOutOfBounds, "oob"}};
  for (const auto& expected : kExpected) {
    EXPECT_EQ(RunVariant(expected.bug, {0, 0.1}).kind, expected.kind) << "bug " << expected.bug;
  }
}

TEST(ExchangeSm90Test, DeadPeerIsReportedAndTheKernelEnds) {
  for (const Interleaving& interleaving : kInterleavings) {
    StartCase(interleaving);
    emulator::Options options = emulator::CurrentOptions();
    options.fast_forward = true;
    emulator::Configure(options);
    const std::vector<Rank> ranks = MakeRanks(true);
    MOK_CHECK(LaunchRank(ranks[1], ex::kCorrect).ok());  // rank 0 is dead
    ASSERT_EQ(runtime::Synchronize(), OkStatus());
    const Status status = CheckDeviceWaitRecord(*ranks[1].record);
    EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
    EXPECT_NE(status.message().find("rank 1, block"), std::string::npos) << status;
    EXPECT_NE(status.message().find("observed 0"), std::string::npos) << status;
  }
}

TEST(ExchangeSm90Test, DeadPeerIsAStallWhenTimeDoesNotRunAhead) {
  StartCase({0, 0.1});
  const std::vector<Rank> ranks = MakeRanks(true);
  MOK_CHECK(LaunchRank(ranks[1], ex::kCorrect).ok());
  const Status status = runtime::Synchronize();
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_NE(status.message().find("livelock"), std::string::npos) << status;
}

}  // namespace
}  // namespace mok::testing
