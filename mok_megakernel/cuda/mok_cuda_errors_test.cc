// What one rank or a kernel finds wrong, through the CUDA C API in the emulator: every rank hears
// of it, nobody waits for a rank that has heard before, and the workspaces work on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "mok_core/device/runtime.h"
#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_megakernel/cuda/cuda_ranks_test_support.h"
#include "mok_megakernel/cuda/cuda_test_cases.h"
#include "mok_megakernel/cuda/workspace_layout.h"

namespace mok::testing {
namespace {

using ::testing::HasSubstr;

// On ranks that something has happened to.
void ExpectWorksOn(CudaRanks& ranks, const LayerData& data, const LayerResult& expected) {
  ranks.SetIds(data.topk_idx);
  ExpectSameBits(expected, RunBoth(ranks), "afterwards");
}

constexpr int kWrongToken = 3;

// The batch's ids but for one of the last rank.
std::vector<int64_t> WrongIds(const LayerData& data) {
  std::vector<int64_t> ids = data.topk_idx;
  const auto first = static_cast<size_t>(data.spec.num_tokens() - data.spec.tokens.back());
  ids[(first + kWrongToken) * static_cast<size_t>(data.spec.topk) + 1] = 4;
  return ids;
}

void ExpectHears(CudaRanks& ranks, int rank) {
  EXPECT_EQ(ranks.Check(rank), MOK_OUT_OF_RANGE);
  EXPECT_EQ(mok_last_error(), StrCat("expert id of rank ", ranks.num_ranks() - 1, ", token ",
                                     kWrongToken, ", k 1: expected -1 to 3, got 4"));
  EXPECT_EQ(ranks.Check(rank), MOK_OK) << mok_last_error();
}

TEST(MokCudaErrorsTest, AnInvalidIdIsReportedOnceAndTheWorkspaceWorksOn) {
  for (const int num_ranks : {1, 2, 3}) {
    const LayerData data(SharedLayer(num_ranks));
    for (const bool own_devices : {false, true}) {
      CudaRanksOptions options;
      options.own_devices = own_devices;
      const LayerResult expected = RunBoth(data, options);
      StartCase({1, 0.1}, true);
      CudaRanks ranks(data, options);
      for (int repeat = 0; repeat < 2; ++repeat) {
        ranks.SetIds(WrongIds(data));
        ranks.Poison();  // what is reduced for that route was written by nobody
        ranks.QueueAll();
        ranks.QueueBackward();
        RunQueued();
        for (int rank = 0; rank < num_ranks; ++rank) ExpectHears(ranks, rank);
        ExpectWorksOn(ranks, data, expected);
      }
    }
  }
}

// Of one rank, which no other one waits for, only that batch is lost.
TEST(MokCudaErrorsTest, ARankAloneWorksOnBeforeItHears) {
  const LayerData data(SharedLayer(1));
  const LayerResult expected = RunBoth(data, {});
  StartCase({1, 0.1}, true);
  CudaRanks ranks(data, {});
  ranks.SetIds(WrongIds(data));
  ranks.Poison();
  ranks.QueueAll();
  RunQueued();
  ranks.SetIds(data.topk_idx);
  ranks.QueueAll();
  ranks.QueueBackward();
  RunQueued();
  ExpectSameBits(expected, ranks.Result(), "before it hears");
  ExpectHears(ranks, 0);
}

// Layers of which the second has an invalid id, on ranks with GPUs of their own. Each layer has its
// schedule; they share everything else.
class Layers {
 public:
  explicit Layers(const LayerData& data) : data_(data), ranks_(data, OwnDevices()) {
    for (int rank = 0; rank < ranks_.num_ranks(); ++rank) {
      second_.push_back(ranks_.NewSchedule(rank));
    }
    ranks_.Poison();  // some of what passes without rows read was written by nobody
    for (int rank = 0; rank < ranks_.num_ranks(); ++rank) QueueForward(rank);
    RunQueued();
    UseSecond();
    ranks_.SetIds(WrongIds(data));
    for (int rank = 0; rank < ranks_.num_ranks(); ++rank) QueueForward(rank);
    RunQueued();
  }

  CudaRanks& ranks() { return ranks_; }

  void QueueForward(int rank) {
    EXPECT_EQ(ranks_.BuildSchedule(rank), MOK_OK) << mok_last_error();
    EXPECT_EQ(ranks_.Forward(rank), MOK_OK) << mok_last_error();
  }
  void QueueBackward(int rank) { EXPECT_EQ(ranks_.Backward(rank), MOK_OK) << mok_last_error(); }
  // All calls that follow use the schedule of the other layer.
  void UseSecond() {
    for (int rank = 0; rank < ranks_.num_ranks(); ++rank) {
      void*& schedule = second_[static_cast<size_t>(rank)];
      void* const before = ranks_.schedule(rank);
      ranks_.SetSchedule(rank, schedule);
      schedule = before;
    }
  }
  // What the ranks other than `heard` run that hear later: another layer, and all backwards.
  void RunAllBut(int heard) {
    for (int rank = 0; rank < ranks_.num_ranks(); ++rank) {
      if (rank == heard) continue;
      QueueBackward(rank);
      QueueForward(rank);
      QueueBackward(rank);
    }
    UseSecond();
    for (int rank = 0; rank < ranks_.num_ranks(); ++rank) {
      if (rank != heard) QueueBackward(rank);
    }
    RunQueued();
  }
  void ExpectAllHearBut(int heard) {
    for (int rank = 0; rank < ranks_.num_ranks(); ++rank) {
      if (rank != heard) ExpectHears(ranks_, rank);
    }
  }

 private:
  const LayerData& data_;
  CudaRanks ranks_;
  std::vector<void*> second_;
};

TEST(MokCudaErrorsTest, NobodyWaitsForARankThatHasHeard) {
  for (const int num_ranks : {2, 3}) {
    const LayerData data(SharedLayer(num_ranks));
    const LayerResult expected = RunBoth(data, OwnDevices());
    for (int heard = 0; heard < num_ranks; ++heard) {
      StartCase({1, 0.1}, true);
      Layers layers(data);
      ExpectHears(layers.ranks(), heard);
      layers.RunAllBut(heard);
      layers.ExpectAllHearBut(heard);
      ExpectWorksOn(layers.ranks(), data, expected);
    }
  }
}

// A rank that goes on after it has heard waits for the others to hear, and no longer.
TEST(MokCudaErrorsTest, ARankThatHasHeardMeetsTheOthersWhenTheyHave) {
  const LayerData data(SharedLayer(3));
  const LayerResult expected = RunBoth(data, OwnDevices());
  StartCase({1, 0.1}, true);
  Layers layers(data);
  ExpectHears(layers.ranks(), 1);
  layers.RunAllBut(1);
  layers.ranks().SetIds(data.topk_idx);
  layers.ranks().Poison();
  layers.QueueForward(1);
  layers.QueueBackward(1);
  layers.ExpectAllHearBut(1);
  for (const int rank : {0, 2}) {
    layers.QueueForward(rank);
    layers.QueueBackward(rank);
  }
  RunQueued();
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(layers.ranks().Check(rank), MOK_OK);
  ExpectSameBits(expected, layers.ranks().Result(), "together again");
}

// A backward of a schedule from before an error that its rank has heard of: nobody waits in it, and
// every rank hears of it.
TEST(MokCudaErrorsTest, ALatePassIsReportedToEveryRank) {
  for (const int num_ranks : {2, 3}) {
    const LayerData data(SharedLayer(num_ranks));
    const LayerResult expected = RunBoth(data, OwnDevices());
    StartCase({1, 0.1}, true);
    Layers layers(data);
    layers.ExpectAllHearBut(-1);
    layers.UseSecond();
    layers.QueueBackward(1);
    RunQueued();
    for (int rank = 0; rank < num_ranks; ++rank) {
      EXPECT_EQ(layers.ranks().Check(rank), MOK_OK);
      layers.QueueForward(rank);
    }
    RunQueued();
    for (int rank = 0; rank < num_ranks; ++rank) {
      EXPECT_EQ(layers.ranks().Check(rank), MOK_FAILED_PRECONDITION);
      EXPECT_EQ(mok_last_error(),
                std::string("rank 1 ran a forward or backward of a schedule that an earlier error "
                            "had made unusable: what it computed is not for use (after an error, "
                            "build schedules again)"));
    }
    ExpectWorksOn(layers.ranks(), data, expected);
  }
}

// A rank fails by itself before it has heard of what all ranks refused.
TEST(MokCudaErrorsTest, ARankThatFailsBeforeItHearsKeepsNobodyWaiting) {
  const LayerData data(SharedLayer(3));
  const LayerResult expected = RunBoth(data, OwnDevices());
  for (const int32_t place : {MOK_CUDA_IN_SCHEDULE, MOK_CUDA_IN_PASS}) {
    StartCase({1, 0.1}, true);
    Layers layers(data);
    CudaRanks& ranks = layers.ranks();
    EXPECT_EQ(ranks.ReportError(2, MOK_TYPE_MISMATCH, place), MOK_OK);
    layers.RunAllBut(2);
    if (place == MOK_CUDA_IN_SCHEDULE) {
      layers.ExpectAllHearBut(-1);
      ExpectWorksOn(ranks, data, expected);
      continue;
    }
    layers.ExpectAllHearBut(2);
    for (const int rank : {0, 1}) layers.QueueForward(rank);
    RunQueued();
    for (const int rank : {0, 1}) {
      EXPECT_EQ(ranks.Check(rank), MOK_TYPE_MISMATCH);
      EXPECT_EQ(mok_last_error(),
                std::string("rank 2 could not take part in the call: see its error"));
    }
    RunQueued();
  }
}

// Rank 1 has been told something else than the others.
void ExpectAllHearOfDisagreement(int num_ranks, const CudaRanksOptions& options,
                                 const std::function<void(CudaRanks::Rank&)>& change,
                                 const std::string& text) {
  LayerSpec spec = SharedLayer(num_ranks);
  spec.tokens.assign(static_cast<size_t>(num_ranks), 8);
  const LayerData data(spec);
  StartCase({1, 0.1});
  CudaRanks ranks(data, options);
  change(ranks.rank(1));
  for (const int32_t part : {MOK_CUDA_STAGE, MOK_CUDA_BUILD}) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      EXPECT_EQ(ranks.BuildSchedule(rank, part), MOK_OK) << mok_last_error();
    }
  }
  RunQueued();
  for (int rank = 0; rank < num_ranks; ++rank) {
    EXPECT_EQ(ranks.Check(rank), MOK_INVALID_ARGUMENT) << text;
    EXPECT_THAT(mok_last_error(), HasSubstr(text));
  }
  RunQueued();
}

TEST(MokCudaErrorsTest, RanksThatDisagreeHearOfIt) {
  const auto nothing = [](CudaRanks::Rank&) {};
  for (const int num_ranks : {2, 3}) {
    ExpectAllHearOfDisagreement(
        num_ranks, {}, [](CudaRanks::Rank& rank) { rank.layer.first_expert = 1; },
        "experts of rank 1: expected to start where the ranks below end, at 2");
    ExpectAllHearOfDisagreement(
        num_ranks, {}, [](CudaRanks::Rank& rank) { rank.layer.intermediate += 8; },
        "intermediate of rank 1: expected ");
    ExpectAllHearOfDisagreement(
        num_ranks, {}, [](CudaRanks::Rank& rank) { rank.layer.shared_intermediate += 8; },
        "shared_intermediate of rank 1: expected ");
    CudaRanksOptions options;
    options.change_options = [](int rank, MokCudaOptions& of_rank) {
      if (rank == 1) of_rank.hidden += 8;
    };
    ExpectAllHearOfDisagreement(num_ranks, options, nothing,
                                "hidden of rank 1: expected 72, that of rank 0, got 80");
    options.change_options = [](int rank, MokCudaOptions& of_rank) {
      if (rank == 1) of_rank.max_tokens = 100;
    };
    ExpectAllHearOfDisagreement(num_ranks, options, nothing,
                                "max_tokens of rank 1: expected 8, that of rank 0, got 100");
  }
}

// A kernel writes a record while the host looks: not yet is not wrong.
TEST(MokCudaErrorsTest, ARecordThatIsBeingWrittenIsNotRead) {
  const LayerData data(SharedLayer());
  StartCase({1, 0.1});
  CudaRanks ranks(data, OwnDevices());
  auto& records = *static_cast<CudaRecords*>(ranks.rank(0).records);
  for (DeviceWaitRecord* record : {&records.schedule_wait, &records.pass_wait}) {
    record->state = 1;
    EXPECT_EQ(ranks.Check(0), MOK_OK) << mok_last_error();
    EXPECT_EQ(mok_cuda_check_usable(ranks.workspace(0)), MOK_OK);
    record->state = 2;
    EXPECT_EQ(ranks.Check(0), MOK_DEADLINE_EXCEEDED);
    EXPECT_EQ(mok_cuda_check_usable(ranks.workspace(0)), MOK_DEADLINE_EXCEEDED);
    *record = {};
  }
}

// What one rank's caller refuses reaches the others: nobody waits, whichever of the passes that
// follow the others run before they hear of it, and the next call works.
TEST(MokCudaErrorsTest, ARankReportsAnErrorToTheOthers) {
  const LayerData data(SharedLayer(3));
  const LayerResult expected = RunBoth(data, OwnDevices());
  for (int failing = 0; failing < 3; ++failing) {
    StartCase({1, 0.1});
    CudaRanks ranks(data, OwnDevices());
    ranks.Poison();
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == failing) {
        EXPECT_EQ(ranks.ReportError(rank, MOK_TYPE_MISMATCH), MOK_OK) << mok_last_error();
        continue;
      }
      EXPECT_EQ(ranks.BuildSchedule(rank), MOK_OK) << mok_last_error();
      if (rank == (failing + 1) % 3) continue;
      EXPECT_EQ(ranks.Forward(rank), MOK_OK) << mok_last_error();
      EXPECT_EQ(ranks.Backward(rank), MOK_OK) << mok_last_error();
    }
    RunQueued();
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(ranks.Check(rank), rank == failing ? MOK_OK : MOK_TYPE_MISMATCH);
      if (rank == failing) continue;
      EXPECT_EQ(mok_last_error(),
                StrCat("rank ", failing, " could not take part in the call: see its error"));
    }
    ExpectWorksOn(ranks, data, expected);
  }
}

// A rank gives up waiting for another one in a schedule. That one comes after all: it gets nothing
// from the first one's forward, which had been queued by then, and hears of it.
TEST(MokCudaErrorsTest, ARankThatComesTooLateHearsOfIt) {
  const LayerData data(SharedLayer());
  StartCase({1, 0.1}, true);
  CudaRanks ranks(data, OwnDevices());
  ranks.Poison();
  EXPECT_EQ(ranks.BuildSchedule(0), MOK_OK);
  RunQueued();
  auto& record = static_cast<CudaRecords*>(ranks.rank(0).records)->schedule_wait;
  const DeviceWaitRecord given_up = record;
  record = {};  // the host is ahead of it
  EXPECT_EQ(ranks.Forward(0), MOK_OK) << mok_last_error();
  record = given_up;
  EXPECT_EQ(ranks.BuildSchedule(1), MOK_OK);
  EXPECT_EQ(ranks.Forward(1), MOK_OK);
  RunQueued();
  EXPECT_EQ(ranks.Check(0), MOK_DEADLINE_EXCEEDED);
  EXPECT_EQ(ranks.Check(1), MOK_DEADLINE_EXCEEDED);
  EXPECT_THAT(mok_last_error(), HasSubstr("for rank 0 at the entry of pass 1"));
}

// A rank that fails between a schedule and its pass leaves. The others do not wait for it, neither
// in that pass nor later, and hear of it.
TEST(MokCudaErrorsTest, ARankThatFailsInAPassLeaves) {
  const LayerData data(SharedLayer(3));
  for (int failing = 0; failing < 3; ++failing) {
    StartCase({1, 0.1});
    CudaRanks ranks(data, OwnDevices());
    ranks.QueueAll();  // its rows are read again, though not used
    ranks.QueueBackward();
    RunQueued();
    const auto for_the_others = [&](auto call) {
      for (int rank = 0; rank < 3; ++rank) {
        if (rank == failing) continue;
        EXPECT_EQ(call(rank), MOK_OK) << mok_last_error();
      }
    };
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks.BuildSchedule(rank), MOK_OK);
    for_the_others([&](int rank) { return mok_cuda_check_ranks(ranks.workspace(rank)); });
    EXPECT_EQ(ranks.ReportError(failing, MOK_RESOURCE_EXHAUSTED, MOK_CUDA_IN_PASS), MOK_OK);
    for_the_others([&](int rank) { return ranks.Forward(rank); });
    for_the_others([&](int rank) { return ranks.Backward(rank); });
    RunQueued();
    const std::string left = StrCat("rank ", failing,
                                    " has left this workspace because of an error in a forward or "
                                    "backward: see its error, and make a new workspace");
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == failing) continue;
      EXPECT_EQ(ranks.Check(rank), MOK_OK);  // it cannot know yet
      EXPECT_EQ(mok_cuda_check_ranks(ranks.workspace(rank)), MOK_RESOURCE_EXHAUSTED);
      EXPECT_EQ(mok_last_error(), left);
    }
    // Its word for the first schedule was given when it left.
    for (int repeat = 0; repeat < 3; ++repeat) {
      EXPECT_EQ(ranks.BuildSchedule(failing), MOK_FAILED_PRECONDITION);
      EXPECT_EQ(mok_last_error(), StrCat("rank ", failing,
                                         " has left this workspace because of an error in a "
                                         "forward or backward that other ranks took part in: make "
                                         "a new workspace"));
      for_the_others([&](int rank) { return ranks.BuildSchedule(rank); });
      for_the_others([&](int rank) { return ranks.Forward(rank); });
      if (repeat == 0) {
        RunQueued();  // none of its kernels waits
      }
      EXPECT_EQ(ranks.ReportError(failing, MOK_FAILED_PRECONDITION), MOK_OK) << mok_last_error();
      RunQueued();
      for (int rank = 0; rank < 3; ++rank) {
        if (rank == failing) continue;
        EXPECT_EQ(ranks.Check(rank),
                  repeat == 0 ? MOK_RESOURCE_EXHAUSTED : MOK_FAILED_PRECONDITION);
      }
    }
    EXPECT_EQ(ranks.Forward(failing), MOK_FAILED_PRECONDITION);
    EXPECT_EQ(ranks.ReportError(failing, MOK_INTERNAL, MOK_CUDA_IN_PASS), MOK_OK);
    RunQueued();
  }
}

}  // namespace
}  // namespace mok::testing
