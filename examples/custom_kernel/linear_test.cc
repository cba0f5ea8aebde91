// The linear layer on two and three emulated GPUs, with race checks: results, passes that follow
// each other, planted mistakes, a rank that never comes.
#include <gtest/gtest.h>

#include "linear.h"
#include "linear_ranks.h"
#include "mok_core/emulator/tests/planted_bug.h"

namespace custom_kernel {
namespace {

using mok::testing::Interleaving;
using mok::testing::kInterleavings;
using mok::testing::Outcome;

// Tails everywhere: short row blocks and exchange tiles, a narrow second column tile, K.
const LinearShape kTwoRanks = {.tokens = {150, 45}, .width = 264, .k = 136};

Outcome RunPass(LinearRanks& ranks, const LinearShape& shape, const void* kernel) {
  ranks.StartPass();
  for (int32_t rank = 0; rank < shape.num_ranks(); ++rank) ranks.Launch(rank, kernel, 2);
  return mok::testing::RunAndCompare([&] { return ranks.Matches(); });
}

TEST(LinearTest, EqualsAPlainProductUnderEverySchedule) {
  const LinearShape three_ranks = {.tokens = {1, 70, 33}, .width = 40, .k = 72};
  for (const LinearShape& shape : {kTwoRanks, three_ranks}) {
    for (const Interleaving& interleaving : kInterleavings) {
      SCOPED_TRACE(interleaving.seed);
      mok::testing::StartCase(interleaving);
      LinearRanks ranks(shape, static_cast<uint32_t>(interleaving.seed));
      for (int pass = 0; pass < 2; ++pass) {
        const Outcome outcome = RunPass(ranks, shape, LinearKernel());
        EXPECT_EQ(outcome.kind, "ok") << outcome.text;
      }
    }
  }
}

TEST(LinearTest, PlantedBugsAreFlagged) {
  for (const Interleaving& interleaving : kInterleavings) {
    SCOPED_TRACE(interleaving.seed);
    const auto kind_of = [&](LinearBug bug) {
      mok::testing::StartCase(interleaving);
      LinearRanks ranks(kTwoRanks, 1);
      return RunPass(ranks, kTwoRanks, BuggyLinearKernel(bug)).kind;
    };
    EXPECT_EQ(kind_of(LinearBug::kNoProxyFence), "proxy-fence");
    EXPECT_EQ(kind_of(LinearBug::kStoredTooEarly), "race");
  }
}

TEST(LinearTest, AMissingRankIsNamedAndWhoMissedItStaysAway) {
  for (const Interleaving& interleaving : kInterleavings) {
    SCOPED_TRACE(interleaving.seed);
    mok::testing::StartCase(interleaving, /*fast_forward=*/true);
    LinearRanks ranks(kTwoRanks, 1);
    ranks.StartPass();
    ranks.Launch(0, LinearKernel(), 2);
    ASSERT_EQ(mok::runtime::Synchronize(), mok::OkStatus());  // the grid ends by itself
    mok::Status status = ranks.CheckWaits(0);
    EXPECT_EQ(status.code(), mok::StatusCode::kDeadlineExceeded);
    EXPECT_NE(status.message().find("role entry: task 1 "), std::string::npos) << status;
    ranks.StartPass();
    for (int32_t rank = 0; rank < 2; ++rank) ranks.Launch(rank, LinearKernel(), 2);
    ASSERT_EQ(mok::runtime::Synchronize(), mok::OkStatus());
    status = ranks.CheckWaits(1);
    EXPECT_NE(status.message().find("role entry: task 0 "), std::string::npos) << status;
  }
}

}  // namespace
}  // namespace custom_kernel
