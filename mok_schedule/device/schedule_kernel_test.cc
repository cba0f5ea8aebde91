// The schedule kernel in the emulator: against the host's tables under many interleavings, with one
// to three ranks on devices of their own or on one; its errors and timeouts; planted bugs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "mok_core/device/runtime.h"
#include "mok_core/device/wait_record.h"
#include "mok_core/emulator/emulator.h"
#include "mok_schedule/device/launch_schedule.h"
#include "mok_schedule/device/schedule_bug.h"
#include "mok_schedule/device/testing/schedule_ranks.h"
#include "mok_schedule/device/testing/schedule_test_kernels.h"

namespace mok {
namespace {

using ::mok::testing::CompareDecoding;
using ::mok::testing::GetSmallScheduleKernel;
using ::mok::testing::RandomScheduleBatch;
using ::mok::testing::RandomScheduleConfig;
using ::mok::testing::ScheduleBatch;
using ::mok::testing::ScheduleRanks;
using ::mok::testing::ScheduleRanksConfig;
using ::testing::HasSubstr;

// Seed 0 is the orderly schedule. fast_forward: what waits in vain ends soon.
void StartCase(uint64_t seed, bool fast_forward = false) {
  emulator::FreeAll();
  emulator::Options options;
  options.seed = seed;
  options.symbolize = false;
  options.fast_forward = fast_forward;
  emulator::Configure(options);
}

ScheduleRanksConfig SmallConfig(ExpertPartition partition, int topk, int64_t max_tokens) {
  ScheduleRanksConfig config;
  config.partition = std::move(partition);
  config.topk = topk;
  config.max_tokens = max_tokens;
  config.grid_blocks = 3;
  config.kernel = GetSmallScheduleKernel(kScheduleCorrect);
  return config;
}

void RunRandomCase(uint64_t seed, bool own_devices) {
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  StartCase(seed);
  ScheduleRanksConfig config = RandomScheduleConfig(3, seed % 4 == 0 ? 300 : 60, random);
  config.kernel = GetSmallScheduleKernel(kScheduleCorrect);
  config.own_devices = own_devices;
  SCOPED_TRACE(config.Description());
  constexpr int kSlots = 3;  // batches in flight, of two alternating buffers
  ScheduleRanks ranks(config, kSlots);
  const bool with_invalid_ids = seed % 3 == 1;
  for (int slot = 0; slot < kSlots; ++slot) {
    ranks.SetBatch(RandomScheduleBatch(config, with_invalid_ids, random), slot);
    ranks.Launch(slot);
  }
  ASSERT_EQ(runtime::Synchronize(), OkStatus());
  for (int slot = 0; slot < kSlots; ++slot) ASSERT_EQ(ranks.Compare(slot), OkStatus());
  for (int rank = 0; rank < config.ep_size(); ++rank) {
    ASSERT_EQ(CheckDeviceWaitRecord(ranks.wait_record(rank)), OkStatus());
    if (!with_invalid_ids) {
      ASSERT_EQ(CheckScheduleErrorRecord(ranks.error(rank)), OkStatus());
    }
  }
}

TEST(ScheduleErrorTest, ARecordCountsWhenItIsCompleteOnly) {
  ScheduleErrorRecord record = {};
  record.kind = ScheduleErrorKind::kExpertId;
  EXPECT_EQ(CheckScheduleErrorRecord(record), OkStatus());  // as after it was handled
  record.state = 1;
  EXPECT_EQ(CheckScheduleErrorRecord(record).code(), StatusCode::kInternal);
  record.state = 2;
  EXPECT_EQ(CheckScheduleErrorRecord(record).code(), StatusCode::kOutOfRange);
  record.kind = ScheduleErrorKind::kNone;
  EXPECT_EQ(CheckScheduleErrorRecord(record).code(), StatusCode::kInternal);
}

TEST(ScheduleKernelTest, EqualsTheHostOnDevicesOfTheirOwn) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    ASSERT_NO_FATAL_FAILURE(RunRandomCase(seed, true));
  }
}

TEST(ScheduleKernelTest, EqualsTheHostWithAllRanksOnOneDevice) {
  for (uint64_t seed = 1000; seed < 1020; ++seed) {
    ASSERT_NO_FATAL_FAILURE(RunRandomCase(seed, false));
  }
}

// The kernel as it runs on a GPU, with 256 threads.
TEST(ScheduleKernelTest, FullKernelEqualsTheHost) {
  for (uint64_t seed = 0; seed < 3; ++seed) {
    SCOPED_TRACE(seed);
    StartCase(seed);
    std::mt19937_64 random(seed);
    ScheduleRanksConfig config = SmallConfig({{0, 40, 75}}, 8, 400);
    config.kernel = GetScheduleKernel();
    config.grid_blocks = 4;
    ScheduleRanks ranks(config, 1);
    ranks.SetBatch(RandomScheduleBatch(config, false, random), 0);
    ranks.Launch(0);
    ASSERT_EQ(runtime::Synchronize(), OkStatus());
    ASSERT_EQ(ranks.Compare(0), OkStatus());
  }
}

// More experts than threads, most of them empty, some over several macrobatches.
TEST(ScheduleKernelTest, ManyExperts) {
  std::mt19937_64 random(5);
  StartCase(1);
  ScheduleRanksConfig config = SmallConfig({{0, 300, 517}}, 4, 300);
  ScheduleRanks ranks(config, 1);
  ScheduleBatch batch = RandomScheduleBatch(config, false, random);
  for (auto& ids : batch) {
    for (size_t i = 0; i < ids.size(); i += 2) ids[i] = i % 3 == 0 ? 299 : 300;
  }
  ranks.SetBatch(batch, 0);
  ranks.Launch(0);
  ASSERT_EQ(runtime::Synchronize(), OkStatus());
  ASSERT_EQ(ranks.Compare(0), OkStatus());
}

TEST(ScheduleKernelTest, ScheduleDoesNotDependOnTheGrid) {
  for (const int grid_blocks : {2, 3, 7, 12}) {
    std::mt19937_64 random(7);
    StartCase(grid_blocks);
    ScheduleRanksConfig config = SmallConfig({{0, 3, 9}}, 2, 200);
    config.grid_blocks = grid_blocks;
    ScheduleRanks ranks(config, 1);
    ranks.SetBatch(RandomScheduleBatch(config, false, random), 0);
    ranks.Launch(0);
    ASSERT_EQ(runtime::Synchronize(), OkStatus());
    ASSERT_EQ(ranks.Compare(0), OkStatus()) << grid_blocks << " blocks";
  }
}

// Device code makes the same program of the schedule as the host of the table.
TEST(ScheduleKernelTest, ProgramsDecodeAlikeOnTheDevice) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    StartCase(seed);
    ScheduleRanksConfig config = RandomScheduleConfig(1, 600, random);
    config.kernel = GetSmallScheduleKernel(kScheduleCorrect);
    ScheduleRanks ranks(config, 1);
    ranks.SetBatch(RandomScheduleBatch(config, false, random), 0);
    ranks.Launch(0);
    ASSERT_EQ(runtime::Synchronize(), OkStatus());
    ASSERT_EQ(CompareDecoding(ranks, 0, 0, random), OkStatus());
  }
}

// The record names the first invalid id in the order of ranks, tokens and k, on every rank, as the
// host does; later errors leave it alone. Every rank refuses the batch.
TEST(ScheduleKernelTest, InvalidIdsAreRecordedOnEveryRank) {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    StartCase(seed);
    ScheduleRanksConfig config = SmallConfig({{0, 4, 4, 7}}, 2, 100);
    ScheduleRanks ranks(config, 2);
    ScheduleBatch batch(3, std::vector<int64_t>(200, 1));
    batch[1][2 * 70 + 1] = (int64_t{1} << 32) + 2;
    batch[1][2 * 90] = -2;
    batch[2][0] = 7;
    ranks.SetBatch(batch, 0);
    ranks.Launch(0);
    ranks.SetBatch(ScheduleBatch(3, std::vector<int64_t>(2, 50)), 1);
    ranks.Launch(1);
    ASSERT_EQ(runtime::Synchronize(), OkStatus());
    for (int slot = 0; slot < 2; ++slot) ASSERT_EQ(ranks.Compare(slot), OkStatus());
    for (int rank = 0; rank < 3; ++rank) {
      const Status status = CheckScheduleErrorRecord(ranks.error(rank));
      EXPECT_EQ(status.code(), StatusCode::kOutOfRange);
      EXPECT_EQ(status.message(),
                "expert id of rank 1, token 70, k 1: expected -1 to 6, got 4294967298");
      EXPECT_EQ(ranks.refusals(rank).generation, 1u);
    }
  }
}

// A rank alone waits for nobody: each batch is refused for what is in it.
TEST(ScheduleKernelTest, ARankAloneRefusesOneBatch) {
  StartCase(1);
  ScheduleRanks ranks(SmallConfig({{0, 4}}, 2, 10), 3);
  for (int slot = 0; slot < 3; ++slot) {
    ranks.SetBatch(ScheduleBatch(1, std::vector<int64_t>(20, slot == 1 ? 4 : 3)), slot);
    ranks.Launch(slot);
  }
  ASSERT_EQ(runtime::Synchronize(), OkStatus());
  for (int slot = 0; slot < 3; ++slot) ASSERT_EQ(ranks.Compare(slot), OkStatus());
  EXPECT_EQ(ranks.refusals(0).generation, 0u);
  EXPECT_EQ(CheckScheduleErrorRecord(ranks.error(0)).message(),
            "expert id of rank 0, token 0, k 0: expected -1 to 3, got 4");
}

// A rank that cannot take part leaves nobody waiting: the others get empty schedules and its code.
TEST(ScheduleKernelTest, ARankThatCannotTakePartIsRecordedByTheOthers) {
  for (int failing = 0; failing < 3; ++failing) {
    StartCase(1);
    ScheduleRanks ranks(SmallConfig({{0, 2, 4, 8}}, 4, 10), 1);
    ranks.SetBatch(ScheduleBatch(3, std::vector<int64_t>(40, 1)), 0);
    ranks.params(failing).layer.failure = StatusCode::kTypeMismatch;
    ranks.params(failing).layer.first_expert = 3;
    ranks.Launch(0);
    ASSERT_EQ(runtime::Synchronize(), OkStatus());
    for (int rank = 0; rank < 3; ++rank) {
      const Status status = CheckScheduleErrorRecord(ranks.error(rank));
      EXPECT_EQ(status.code(), rank == failing ? StatusCode::kOk : StatusCode::kTypeMismatch);
      EXPECT_EQ(ranks.CompareRefused(0, rank), OkStatus());
      // The failing rank's host has raised already.
      EXPECT_EQ(ranks.refusals(rank).generation, rank == failing ? 2u : 1u);
    }
    const Status status = CheckScheduleErrorRecord(ranks.error(failing == 0 ? 1 : 0));
    EXPECT_EQ(status.message(),
              StrCat("rank ", failing, " could not take part in the call: see its error"));
  }
}

// One of several ranks disagrees with the others: every rank gets an empty schedule and the same
// error, whose text this is; else how it went wrong.
std::string DisagreementOf(int num_ranks, const std::function<void(ScheduleParams&)>& change,
                           int bug = kScheduleCorrect, uint64_t seed = 1) {
  StartCase(seed, true);
  ScheduleRanksConfig config = SmallConfig(EvenPartition(4 * num_ranks, num_ranks), 4, 10);
  config.kernel = GetSmallScheduleKernel(bug);
  config.timeout_ns = 1'000'000;
  ScheduleRanks ranks(config, 1);
  ranks.SetBatch(ScheduleBatch(num_ranks, std::vector<int64_t>(20, 1)), 0);
  change(ranks.params(1));
  ranks.Launch(0);
  const emulator::Report report = emulator::Run();
  if (!report.ok) return report.kind;
  const Status first = CheckScheduleErrorRecord(ranks.error(0));
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (CheckScheduleErrorRecord(ranks.error(rank)) != first) return "different errors";
    if (!ranks.CompareRefused(0, rank).ok()) return "not refused";
  }
  return first.message();
}

// Of a rank that disagrees: how, and what all ranks hear.
struct Disagreement {
  void (*change)(ScheduleParams& params);
  const char* text;
};

// Also its ids then lie elsewhere than the others look for them.
void DisagreeOnMaxTokens(ScheduleParams& params) {
  params.exchange.layout = ScheduleExchangeLayout(params.layer.ep_size, 5, params.layer.topk);
}
constexpr Disagreement kDisagreements[] = {
    {[](ScheduleParams& p) { p.layer.hidden = 8; },
     "hidden of rank 1: expected 0, that of rank 0, got 8"},
    {[](ScheduleParams& p) { p.layer.intermediate = 16; },
     "intermediate of rank 1: expected 0, that of rank 0, got 16"},
    {[](ScheduleParams& p) { p.layer.shared_intermediate = 24; },
     "shared_intermediate of rank 1: expected 0, that of rank 0, got 24"},
    {DisagreeOnMaxTokens, "max_tokens of rank 1: expected 10, that of rank 0, got 5"},
};

TEST(ScheduleKernelTest, DisagreementIsRecordedOnEveryRank) {
  for (const int num_ranks : {2, 3}) {
    const auto text = [&](auto change) { return DisagreementOf(num_ranks, change); };
    for (const Disagreement& known : kDisagreements) EXPECT_EQ(text(known.change), known.text);
    EXPECT_EQ(text([](ScheduleParams& p) { p.layer.topk = 2; }),
              "topk of rank 1: expected 4, that of rank 0, got 2");
    EXPECT_EQ(text([](ScheduleParams& p) { p.layer.num_experts += 1; }),
              StrCat("number of experts of rank 1: expected ", 4 * num_ranks,
                     ", that of rank 0, got ", 4 * num_ranks + 1));
    EXPECT_THAT(text([](ScheduleParams& p) { p.layer.first_expert = 3; }),
                HasSubstr("experts of rank 1: expected to start where the ranks below end, at 4"));
  }
}

// A rank that does not come: the others name it, end, and leave empty schedules, now and later.
TEST(ScheduleKernelTest, MissingRankIsNamed) {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    StartCase(seed, true);
    ScheduleRanksConfig config = SmallConfig({{0, 2, 4, 6}}, 2, 50);
    ScheduleRanks ranks(config, 3);
    for (int slot = 0; slot < 3; ++slot) {
      ranks.SetBatch(ScheduleBatch(3, std::vector<int64_t>(100, 5)), slot);
    }
    ranks.Launch(0);
    ASSERT_EQ(runtime::Synchronize(), OkStatus());
    for (const int slot : {1, 2}) {
      ranks.LaunchRanks(slot, {0, 2});
      ASSERT_EQ(runtime::Synchronize(), OkStatus());
      for (const int rank : {0, 2}) {
        const DeviceWaitRecord& record = ranks.wait_record(rank);
        EXPECT_EQ(record.rank, rank);
        EXPECT_EQ(record.task, 1) << "the rank waited for";
        EXPECT_EQ(record.expected, 2u);
        EXPECT_EQ(record.observed, 1u);
        const Status status = CheckDeviceWaitRecord(record, {nullptr, &ScheduleWaitName});
        EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
        EXPECT_THAT(status.message(), HasSubstr("task 1 of kind expert ids of the rank"));
        const DeviceSchedule& schedule = ranks.schedule(rank, slot);
        EXPECT_EQ(schedule.result->num_row_blocks, 0);
        EXPECT_EQ(schedule.table().num_row_blocks(), 0);
        EXPECT_FALSE(TakesPart(*schedule.result, ranks.refusals(rank)));
      }
    }
    ASSERT_EQ(ranks.Compare(0), OkStatus());
  }
}

// Two batches one after the other on three ranks; "ok", or how it went wrong.
std::string RunBatches(int bug, uint64_t seed) {
  StartCase(seed);
  std::mt19937_64 random(3);
  ScheduleRanksConfig config = SmallConfig({{0, 3, 4, 6}}, 3, 150);
  config.kernel = GetSmallScheduleKernel(bug);
  constexpr int kSlots = 3;
  ScheduleRanks ranks(config, kSlots);
  for (int slot = 0; slot < kSlots; ++slot) {
    ranks.SetBatch(RandomScheduleBatch(config, false, random), slot);
    ranks.Launch(slot);
  }
  const emulator::Report report = emulator::Run();
  if (!report.ok) return report.kind;
  for (int slot = 0; slot < kSlots; ++slot) {
    if (!ranks.Compare(slot).ok()) return "mismatch";
  }
  return "ok";
}

// A refused batch whose error the ranks' hosts raise one earlier than the other, and the batch that
// follows when all have; before the latter, rank 1 may have run a pass that was late.
class RefusedBatches {
 public:
  RefusedBatches(int bug, int num_ranks) : ranks_(Config(bug, num_ranks), kSlots) {
    all_.resize(static_cast<size_t>(num_ranks));
    std::iota(all_.begin(), all_.end(), 0);
    for (int slot = 0; slot < kSlots; ++slot) {
      ranks_.SetBatch(ScheduleBatch(all_.size(), std::vector<int64_t>(8, slot)), slot);
    }
  }

  std::string Run() {
    ScheduleBatch invalid(all_.size(), std::vector<int64_t>(8, 1));
    invalid.back()[3] = 6;
    ranks_.Launch(kBefore);
    std::string kind = RunRefusal(invalid, "expert id of rank", 1);
    if (kind != "ok" || all_.size() == 1) return kind;
    RefusalState late = ranks_.refusals(1);
    late.late_passes = 1;
    ranks_.SetRefusals(1, late);
    return RunRefusal(ScheduleBatch(all_.size(), std::vector<int64_t>(8, 1)),
                      "rank 1 ran a forward or backward of a schedule", 3);
  }

 private:
  enum Slot { kBefore, kRefused, kUnheard, kAfter, kSlots };

  static ScheduleRanksConfig Config(int bug, int num_ranks) {
    ScheduleRanksConfig config = SmallConfig(EvenPartition(6, num_ranks), 2, 4);
    config.kernel = GetSmallScheduleKernel(bug);
    config.timeout_ns = 1'000'000;
    return config;
  }

  bool Matches(int slot, bool is_refused) const {
    if (!is_refused) return ranks_.Compare(slot).ok();
    return std::all_of(all_.begin(), all_.end(), [&](int rank) {
      const bool ran = slot != kUnheard || rank > 0;
      return !ran || ranks_.CompareRefused(slot, rank).ok();
    });
  }

  // Rank r has r calls in flight when its host hears: rank 0 none.
  std::string RunRefusal(const ScheduleBatch& refused, const std::string& text,
                         uint64_t generation) {
    ranks_.SetBatch(refused, kRefused);
    ranks_.LaunchRanks(kRefused, all_);
    for (const int rank : all_) {
      for (int call = 0; call < rank; ++call) ranks_.LaunchRanks(kUnheard, {rank});
      if (all_.size() > 1) ranks_.Resume(rank);
    }
    ranks_.Launch(kAfter);
    const emulator::Report report = emulator::Run();
    if (!report.ok) return report.kind;
    for (const int rank : all_) {
      if (ranks_.wait_record(rank).state != 0) return "timeout";
      ScheduleErrorRecord& error = ranks_.error(rank);
      if (CheckScheduleErrorRecord(error).message().find(text) != 0) return "no error";
      error = {};
      const uint64_t expected = all_.size() == 1 ? 0 : generation + 1;
      if (ranks_.refusals(rank).generation != expected) return "generation";
    }
    const bool matches = Matches(kBefore, false) && Matches(kRefused, true) &&
                         Matches(kUnheard, true) && Matches(kAfter, false);
    return matches ? "ok" : "mismatch";
  }

  ScheduleRanks ranks_;
  std::vector<int> all_;
};

std::string RunRefusals(int bug, uint64_t seed, int num_ranks) {
  StartCase(seed, true);
  return RefusedBatches(bug, num_ranks).Run();
}

std::string RunWithBug(int bug, uint64_t seed) {
  std::string kind = RunBatches(bug, seed);
  if (kind == "ok") kind = RunRefusals(bug, seed, 3);
  if (kind != "ok") return kind;
  for (const Disagreement& known : kDisagreements) {
    const std::string text = DisagreementOf(3, known.change, bug, seed);
    if (text != known.text) return text.empty() ? "no error" : text;
  }
  return kind;
}

// Nobody waits for a rank whose host has raised the error and makes no more calls.
TEST(ScheduleKernelTest, RanksStayInStepWheneverTheirHostsHearOfARefusal) {
  for (const int num_ranks : {1, 2, 3}) {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      EXPECT_EQ(RunRefusals(kScheduleCorrect, seed, num_ranks), "ok") << num_ranks << " ranks";
    }
  }
}

TEST(ScheduleKernelTest, EveryPlantedBugIsFlagged) {
  for (int bug = 0; bug < kScheduleBugCount; ++bug) {
    std::string kinds;
    for (uint64_t seed = 0; seed < 4; ++seed) {
      const std::string kind = RunWithBug(bug, seed);
      kinds += " " + kind;
      EXPECT_EQ(kind == "ok", bug == kScheduleCorrect) << "bug " << bug << ", seed " << seed;
    }
    std::printf("bug %2d:%s\n", bug, kinds.c_str());
  }
}

TEST(ScheduleKernelTest, GridGrowsWithTheBatch) {
  EXPECT_EQ(ScheduleGridBlocks(0, 132, 256), 2);
  EXPECT_EQ(ScheduleGridBlocks(2 * 2048 * 8, 132, 256), 33);  // 32 blocks place, 4 routes a thread
  EXPECT_EQ(ScheduleGridBlocks(int64_t{1} << 30, 132, 256), 132);
  EXPECT_EQ(ScheduleGridBlocks(int64_t{1} << 30, 1, 256), 2);
}

TEST(ScheduleKernelTest, ArgumentsAreChecked) {
  StartCase(0);
  ScheduleRanksConfig config = SmallConfig({{0, 3, 6}}, 3, 50);
  ScheduleRanks ranks(config, 1);
  const auto message = [&](auto change, int grid_blocks = 2) {
    ScheduleParams params = ranks.params(1);
    params.schedule = ranks.schedule(1, 0);
    change(params);
    ScheduleLaunch launch;
    launch.grid_blocks = grid_blocks;
    const Status status = LaunchSchedule(config.kernel, params, launch);
    return status.ok() ? std::string("ok") : status.message();
  };
  const auto unchanged = [](ScheduleParams&) {};
  EXPECT_EQ(message(unchanged, 1), "schedule: grid_blocks: expected 2 to 2147483647, got 1");
  EXPECT_EQ(message([](ScheduleParams& p) { p.tokens.num_tokens = 51; }),
            "schedule: num_tokens: expected 0 to 50, got 51");
  EXPECT_EQ(message([](ScheduleParams& p) { p.tokens.id_bytes = 2; }),
            "schedule: id_bytes: expected 4 or 8, got 2");
  EXPECT_EQ(message([](ScheduleParams& p) { p.layer.rank = 2; }),
            "schedule: rank: expected 0 to 1, got 2");
  EXPECT_EQ(message([](ScheduleParams& p) { p.layer.topk = 0; }),
            "schedule: topk: expected 1 to 2147483647, got 0");
  EXPECT_EQ(message([](ScheduleParams& p) { p.layer.first_expert = 4; }),
            "schedule: first_expert: expected 0 to 3, got 4");
  EXPECT_EQ(message([](ScheduleParams& p) { p.schedule.macrobatch_blocks = 0; }),
            "schedule: macrobatch_blocks: expected 1 to 2147483647, got 0");
  EXPECT_THAT(message([](ScheduleParams& p) { p.layer.topk = 1 << 30; }),
              HasSubstr("of the largest batch: expected 0 to 2147483647"));
  EXPECT_THAT(message([](ScheduleParams& p) {
                p.layer.num_experts = 5000;
                p.schedule.num_local_experts = 3000;
              }),
              HasSubstr("num_local_experts: expected 0 to 2048, got 3000"));
}

}  // namespace
}  // namespace mok
