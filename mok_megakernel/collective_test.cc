// Collective calls that go wrong: wrong arguments, ranks that disagree, ranks that do not come.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "mok_core/status.h"
#include "mok_megakernel/layer_test_support.h"

namespace mok::testing {
namespace {

LayerSpec SmallSpec() {
  LayerSpec spec;
  spec.tokens = {9, 12, 5};
  spec.experts = {2, 1, 2};
  spec.topk = 2;
  spec.hidden = 24;
  spec.intermediate = 16;
  spec.shared_intermediate = 32;
  return spec;
}

// As many tokens, other contents and routes.
LayerSpec OtherSpec() {
  LayerSpec spec = SmallSpec();
  spec.seed = 2;
  return spec;
}

using Ranks = std::vector<std::unique_ptr<RankLayer>>;
Ranks RanksOf(const LayerData& data, const RunOptions& options = {}) {
  Ranks ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.push_back(std::make_unique<RankLayer>(data, rank, options));
  }
  return ranks;
}

// What one rank's call returned.
struct Outcome {
  int32_t code = MOK_OK;
  std::string text;
};

// Three ranks, ready to call.
class CollectiveTest : public ::testing::Test {
 protected:
  explicit CollectiveTest(double timeout_seconds = 60)
      : data_(SmallSpec()), workspaces_(data_.spec, timeout_seconds) {
    RunOptions options;
    options.threads = 2;
    ranks_ = RanksOf(data_, options);
  }

  RankLayer& rank(int index) { return *ranks_[static_cast<size_t>(index)]; }

  std::vector<Outcome> OnRanks(const std::function<int32_t(int rank)>& call) {
    std::vector<Outcome> outcomes(3);
    RunRanks(3, [&](int rank) {
      Outcome& outcome = outcomes[static_cast<size_t>(rank)];
      outcome.code = call(rank);
      outcome.text = mok_last_error();
    });
    return outcomes;
  }
  std::vector<Outcome> Schedules() {
    return OnRanks([&](int index) { return rank(index).BuildSchedule(workspaces_[index]); });
  }
  std::vector<Outcome> Forwards() {
    return OnRanks([&](int index) { return rank(index).Forward(workspaces_[index]); });
  }
  std::vector<Outcome> Backwards() {
    return OnRanks([&](int index) { return rank(index).Backward(workspaces_[index]); });
  }

  void ExpectAllOk(const std::vector<Outcome>& outcomes) {
    for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.code, MOK_OK) << outcome.text;
  }
  // The same error on every rank.
  void ExpectEverywhere(const std::vector<Outcome>& outcomes, int32_t code,
                        const std::string& text) {
    for (const Outcome& outcome : outcomes) {
      EXPECT_EQ(outcome.code, code);
      EXPECT_EQ(outcome.text, text);
    }
  }
  // After a rejected call the workspaces must be as good as new.
  void ExpectWorks() {
    ExpectAllOk(Schedules());
    ExpectAllOk(Forwards());
    ExpectAllOk(Backwards());
    LayerResult result;
    for (int index = 0; index < 3; ++index) {
      result.out.Append(rank(index).out);
      result.d_x.Append(rank(index).d_x);
    }
    const LayerResult expected = RunLayer(data_, {});
    EXPECT_TRUE(result.out == expected.out);
    EXPECT_TRUE(result.d_x == expected.d_x);
  }

  LayerData data_;
  RankWorkspaces workspaces_;
  Ranks ranks_;
};

TEST_F(CollectiveTest, ExpertIdTooHigh) {
  const int64_t old = std::exchange(data_.topk_idx[(9 + 4) * 2 + 1], 5);
  ExpectEverywhere(Schedules(), MOK_OUT_OF_RANGE,
                   "topk_idx: rank 1, token 4, k 1: expected an expert id in [-1, 5), got 5");
  data_.topk_idx[(9 + 4) * 2 + 1] = old;
  ExpectWorks();
}

TEST_F(CollectiveTest, ExpertIdTooLow) {
  const int64_t old = std::exchange(data_.topk_idx[(9 + 12 + 3) * 2], -2);
  ExpectEverywhere(Schedules(), MOK_OUT_OF_RANGE,
                   "topk_idx: rank 2, token 3, k 0: expected an expert id in [-1, 5), got -2");
  data_.topk_idx[(9 + 12 + 3) * 2] = old;
  ExpectWorks();
}

TEST_F(CollectiveTest, ExpertIdBeyond32Bits) {
  const int64_t old = std::exchange(data_.topk_idx[7 * 2 + 1], (int64_t{1} << 32) + 1);
  ExpectEverywhere(
      Schedules(), MOK_OUT_OF_RANGE,
      "topk_idx: rank 0, token 7, k 1: expected an expert id in [-1, 5), got 4294967297");
  data_.topk_idx[7 * 2 + 1] = old;
  ExpectWorks();
}

TEST_F(CollectiveTest, NoExpertAnywhere) {
  for (int index = 0; index < 3; ++index) rank(index).schedule_args.num_local_experts = 0;
  ExpectEverywhere(Schedules(), MOK_INVALID_ARGUMENT,
                   "num_local_experts: 0 on every rank, expected at least one expert");
}

TEST_F(CollectiveTest, RanksDisagreeOnNumExperts) {
  for (int index = 0; index < 3; ++index) rank(index).schedule_args.num_experts = 5;
  ExpectWorks();
  rank(1).schedule_args.num_experts = 8;
  ExpectEverywhere(Schedules(), MOK_INVALID_ARGUMENT,
                   "schedule_build: ranks disagree on num_experts: rank 0 has 5, rank 1 has 8");
  for (int index = 0; index < 3; ++index) rank(index).schedule_args.num_experts = 8;
  ExpectEverywhere(Schedules(), MOK_INVALID_ARGUMENT,
                   "num_experts: expected 8, the ranks' num_local_experts add up to 5");
  for (int index = 0; index < 3; ++index) rank(index).schedule_args.num_experts = 0;
  ExpectWorks();
}

TEST_F(CollectiveTest, MoreTokensThanTheWorkspaceHolds) {
  rank(1).schedule_args.num_tokens = 13;
  ExpectEverywhere(Schedules(), MOK_INVALID_ARGUMENT,
                   "rank 1: num_tokens: expected 0 to max_tokens = 12 of the workspace, got 13");
  rank(1).schedule_args.num_tokens = 12;
  ExpectWorks();
}

TEST_F(CollectiveTest, OneRankHasAWrongArgument) {
  ExpectAllOk(Schedules());
  const void* x = std::exchange(rank(2).forward_args.layer.x, nullptr);
  ExpectEverywhere(Forwards(), MOK_INVALID_ARGUMENT, "rank 2: x: expected a pointer, got null");
  rank(2).forward_args.layer.x = x;
  ExpectWorks();
}

TEST_F(CollectiveTest, RanksDisagreeOnIntermediate) {
  ExpectAllOk(Schedules());
  rank(1).forward_args.layer.routed.intermediate = 8;
  ExpectEverywhere(Forwards(), MOK_INVALID_ARGUMENT,
                   "forward: ranks disagree on intermediate size of the routed experts: rank 0 "
                   "has 16, rank 1 has 8");
  rank(1).forward_args.layer.routed.intermediate = 16;
  ExpectWorks();
}

TEST_F(CollectiveTest, RanksDisagreeOnSwigluLimit) {
  ExpectAllOk(Schedules());
  rank(2).forward_args.layer.swiglu_limit = 7;
  ExpectEverywhere(Forwards(), MOK_INVALID_ARGUMENT,
                   "forward: ranks disagree on swiglu_limit: rank 0 has inf, rank 2 has 7");
  rank(2).forward_args.layer.swiglu_limit = 0;
  ExpectWorks();
}

TEST_F(CollectiveTest, RanksDisagreeOnIsa) {
  ExpectAllOk(Schedules());
  for (int index = 0; index < 3; ++index) rank(index).config.isa = mok_best_isa();
  if (mok_best_isa() == 0) return;  // one ISA: nothing to disagree on
  rank(2).config.isa = 0;
  ExpectEverywhere(Forwards(), MOK_INVALID_ARGUMENT,
                   StrCat("forward: ranks disagree on isa: rank 0 has ",
                          mok_isa_name(mok_best_isa()), ", rank 2 has portable"));
}

TEST_F(CollectiveTest, RanksDisagreeOnTheCall) {
  ExpectAllOk(Schedules());
  ExpectAllOk(Forwards());
  const std::string text =
      "ranks disagree on the collective call: rank 0 called forward, rank 1 called backward";
  ExpectEverywhere(OnRanks([&](int index) {
                     return index == 1 ? rank(index).Backward(workspaces_[index])
                                       : rank(index).Forward(workspaces_[index]);
                   }),
                   MOK_INVALID_ARGUMENT, text);
  ExpectEverywhere(
      OnRanks([&](int index) {
        return index == 2 ? rank(index).BuildSchedule(workspaces_[index])
                          : rank(index).Forward(workspaces_[index]);
      }),
      MOK_INVALID_ARGUMENT,
      "ranks disagree on the collective call: rank 0 called forward, rank 2 called schedule_build");
  ExpectWorks();
}

TEST_F(CollectiveTest, RanksDisagreeOnTheSchedule) {
  ExpectAllOk(Schedules());
  const LayerData other_data(OtherSpec());
  const auto others = RanksOf(other_data);
  ExpectAllOk(OnRanks([&](int index) {
    return others[static_cast<size_t>(index)]->BuildSchedule(workspaces_[index]);
  }));
  const std::vector<Outcome> outcomes = OnRanks([&](int index) {
    return index == 0 ? others[0]->Forward(workspaces_[0])
                      : rank(index).Forward(workspaces_[index]);
  });
  const std::string begin =
      "forward: ranks disagree on schedule (fingerprint of all ranks' routes): rank 0 has ";
  EXPECT_EQ(outcomes[0].text.substr(0, begin.size()), begin);
  ExpectEverywhere(outcomes, MOK_INVALID_ARGUMENT, outcomes[0].text);
  ExpectWorks();
}

TEST_F(CollectiveTest, RanksDisagreeOnDifferentiation) {
  ExpectAllOk(Schedules());
  rank(1).forward_args.differentiated = 1;
  ExpectEverywhere(Forwards(), MOK_INVALID_ARGUMENT,
                   "forward: ranks disagree on differentiation (grad mode, and an input that "
                   "requires a gradient): rank 0 has no, rank 1 has yes");
  for (int index = 0; index < 3; ++index) rank(index).forward_args.differentiated = 1;
  ExpectWorks();
  rank(2).forward_args.differentiated = 2;
  ExpectEverywhere(Forwards(), MOK_INVALID_ARGUMENT,
                   "rank 2: differentiated: expected 0 to 1, got 2");
  rank(2).forward_args.differentiated = 1;
  rank(2).forward_args.clear_spare_rows = -1;
  ExpectEverywhere(Forwards(), MOK_INVALID_ARGUMENT,
                   "rank 2: clear_spare_rows: expected 0 to 1, got -1");
}

// Same sizes, other tokens: only the contents of the ring can tell.
TEST_F(CollectiveTest, ContextOfAnotherBatch) {
  const LayerData other_data(OtherSpec());
  const auto others = RanksOf(other_data);
  ExpectAllOk(OnRanks([&](int index) {
    RankLayer& other = *others[static_cast<size_t>(index)];
    const int32_t code = other.BuildSchedule(workspaces_[index]);
    return code == MOK_OK ? other.Forward(workspaces_[index]) : code;
  }));
  ExpectAllOk(Schedules());
  ExpectAllOk(Forwards());
  const MokContext own = rank(1).backward_args.context;
  rank(1).backward_args.context = others[1]->backward_args.context;
  const std::vector<Outcome> outcomes = Backwards();
  const std::string begin = "rank 1: context.ring_x: row ";
  EXPECT_EQ(outcomes[0].text.substr(0, begin.size()), begin);
  ExpectEverywhere(outcomes, MOK_INVALID_ARGUMENT, outcomes[0].text);
  // A context that says it holds nothing is not looked at.
  for (int index = 0; index < 3; ++index) rank(index).backward_args.kept_macrobatches = 0;
  ExpectAllOk(Backwards());
  rank(1).backward_args.context = own;
  for (int index = 0; index < 3; ++index) rank(index).backward_args.kept_macrobatches = 1;
  ExpectWorks();
}

TEST_F(CollectiveTest, CallersErrorReachesEveryRank) {
  ExpectAllOk(Schedules());
  ExpectEverywhere(OnRanks([&](int index) {
                     return index == 1
                                ? mok_workspace_report_error(workspaces_[1], MOK_OP_FORWARD,
                                                             MOK_TYPE_MISMATCH, "x: expected bf16")
                                : rank(index).Forward(workspaces_[index]);
                   }),
                   MOK_TYPE_MISMATCH, "rank 1: x: expected bf16");
  ExpectWorks();
}

TEST_F(CollectiveTest, LowestRanksErrorWins) {
  ExpectAllOk(Schedules());
  ExpectEverywhere(OnRanks([&](int index) {
                     return index == 0 ? rank(0).Forward(workspaces_[0])
                                       : mok_workspace_report_error(
                                             workspaces_[index], MOK_OP_FORWARD,
                                             MOK_INVALID_ARGUMENT, StrCat("no. ", index).c_str());
                   }),
                   MOK_INVALID_ARGUMENT, "rank 1: no. 1");
}

TEST_F(CollectiveTest, LongErrorIsCut) {
  const std::string text(5000, 'x');
  const std::vector<Outcome> outcomes = OnRanks([&](int index) {
    return mok_workspace_report_error(workspaces_[index], MOK_OP_SCHEDULE, MOK_INTERNAL,
                                      text.c_str());
  });
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.text.substr(0, 12), "rank 0: xxxx");
    EXPECT_GT(outcome.text.size(), 500u);
  }
}

// A rejected backward must not have added to anybody's gradients, although the shared expert's need
// no other rank.
TEST_F(CollectiveTest, RejectedBackwardLeavesGradientsAlone) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    RunOptions options;
    options.threads = 4;
    options.accumulate = true;
    options.initial_grad = 3;
    for (int index = 0; index < 3; ++index) {
      ranks_[static_cast<size_t>(index)] = std::make_unique<RankLayer>(data_, index, options);
    }
    ExpectAllOk(Schedules());
    ExpectAllOk(Forwards());
    const std::vector<Outcome> outcomes = OnRanks([&](int index) {
      return index == 1 ? mok_workspace_report_error(workspaces_[1], MOK_OP_BACKWARD,
                                                     MOK_INVALID_ARGUMENT, "no")
                        : rank(index).Backward(workspaces_[index]);
    });
    ExpectEverywhere(outcomes, MOK_INVALID_ARGUMENT, "rank 1: no");
    for (const Tensor* gradient : {&rank(0).d_gate, &rank(0).d_down, &rank(0).d_shared_gate,
                                   &rank(0).d_shared_up, &rank(0).d_shared_down}) {
      for (int64_t i = 0; i < gradient->size(); ++i) ASSERT_EQ(gradient->Get(i), 3.0);
    }
  }
}

class MissingRankTest : public CollectiveTest {
 protected:
  MissingRankTest() : CollectiveTest(0.3) {}

  // Ranks 0 and 2 call, rank 1 does not.
  void ExpectTimeout(const std::function<int32_t(int rank)>& call) {
    const auto begin = std::chrono::steady_clock::now();
    const std::vector<Outcome> outcomes =
        OnRanks([&](int index) { return index == 1 ? MOK_OK : call(index); });
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    EXPECT_GE(elapsed.count(), 0.3);
    EXPECT_LT(elapsed.count(), 20);  // sanitizers on a busy machine
    for (const int index : {0, 2}) {
      const Outcome& outcome = outcomes[static_cast<size_t>(index)];
      EXPECT_EQ(outcome.code, MOK_DEADLINE_EXCEEDED);
      EXPECT_NE(outcome.text.find("missing rank 1"), std::string::npos) << outcome.text;
      EXPECT_EQ(outcome.text.find("rank 2 ("), std::string::npos) << outcome.text;
      EXPECT_EQ(mok_workspace_check(workspaces_[index]), MOK_DEADLINE_EXCEEDED);
      EXPECT_EQ(mok_last_error(), outcome.text);
    }
    // The first error stays, and comes at once.
    const std::vector<Outcome> again = OnRanks(
        [&](int index) { return index == 1 ? MOK_OK : rank(index).Forward(workspaces_[index]); });
    EXPECT_EQ(again[0].code, MOK_DEADLINE_EXCEEDED);
    EXPECT_EQ(again[0].text, outcomes[0].text);
  }
};

TEST_F(MissingRankTest, Schedule) {
  ExpectTimeout([&](int index) { return rank(index).BuildSchedule(workspaces_[index]); });
}

TEST_F(MissingRankTest, Forward) {
  ExpectAllOk(Schedules());
  ExpectTimeout([&](int index) { return rank(index).Forward(workspaces_[index]); });
}

TEST_F(MissingRankTest, BackwardWithCommunicationThreads) {
  ExpectAllOk(Schedules());
  ExpectAllOk(Forwards());
  for (const int index : {0, 2}) rank(index).config.num_comm_threads = 1;
  ExpectTimeout([&](int index) { return rank(index).Backward(workspaces_[index]); });
}

TEST(WorkspaceCreateTest, RanksOfAGroupDisagree) {
  LayerSpec spec = SmallSpec();
  MokInProcessGroup* group = nullptr;
  ASSERT_EQ(mok_in_process_group_create(3, &group), MOK_OK);
  MokWorkspace* first = nullptr;
  MokWorkspaceOptions options = WorkspaceOptionsOf(spec, 2, group, nullptr);
  ASSERT_EQ(mok_workspace_create(&options, &first), MOK_OK) << mok_last_error();
  options.rank = 1;
  options.hidden = 32;
  MokWorkspace* second = nullptr;
  EXPECT_EQ(mok_workspace_create(&options, &second), MOK_INVALID_ARGUMENT);
  EXPECT_STREQ(mok_last_error(),
               "workspace_create: ranks disagree on hidden: rank 2 has 24, rank 1 has 32");
  options.rank = 2;
  options.hidden = 24;
  EXPECT_EQ(mok_workspace_create(&options, &second), MOK_FAILED_PRECONDITION);
  mok_workspace_destroy(first);
  mok_in_process_group_destroy(group);
}

}  // namespace
}  // namespace mok::testing
