// The grouped GEMM and its planted bugs.
#include "mok_core/emulator/tests/grouped_gemm_sm90.h"

#include <cmath>

#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_core/emulator/tests/test_support.h"

namespace mok::testing {
namespace {

namespace gg = grouped_gemm;

constexpr int kGroups = 3, kRows = 256, kColumns = 256, kDepth = 320;  // more steps than stages

struct Problem {
  std::vector<int32_t> offsets{0, 100, 100, kRows};
  std::vector<uint16_t> a = ExactBFloat16(kRows * kDepth, 5);
  std::vector<uint16_t> b = ExactBFloat16(kGroups * kColumns * kDepth, 6);
  std::vector<float> c;  // exact
  Problem() : c(kRows * kColumns) {
    for (int g = 0; g < kGroups; ++g) {
      for (int m = offsets[g]; m < offsets[g + 1]; ++m) {
        for (int n = 0; n < kColumns; ++n) c[m * kColumns + n] = Dot(m, g * kColumns + n);
      }
    }
  }
  float Dot(int m, int n) const {
    float sum = 0;
    for (int k = 0; k < kDepth; ++k) {
      sum += BFloat16ToFloat(a[m * kDepth + k]) * BFloat16ToFloat(b[n * kDepth + k]);
    }
    return sum;
  }
};

const Problem& TheProblem() {
  static const Problem problem;
  return problem;
}

bool Matches(const gg::Params& p) {
  const Problem& problem = TheProblem();
  const std::vector<uint16_t> c = HostCopy(p.c, kRows * kColumns);
  const std::vector<float> sums = HostCopy(p.sums, kGroups);
  for (int g = 0; g < kGroups; ++g) {
    double sum = 0;
    for (int i = problem.offsets[g] * kColumns; i < problem.offsets[g + 1] * kColumns; ++i) {
      if (c[i] != RoundToBFloat16(problem.c[i]).bits) return false;
      sum += BFloat16ToFloat(c[i]);
    }
    if (!(std::fabs(sum - sums[g]) <= 1e-3 * (1 + std::fabs(sum)))) return false;
  }
  return true;
}

Outcome RunVariant(int bug, const Interleaving& interleaving) {
  StartCase(interleaving);
  const Problem& problem = TheProblem();
  gg::Params p{};
  const uint16_t* a = DeviceArray(problem.a, "A");
  const uint16_t* b = DeviceArray(problem.b, "B");
  p.a = MatrixMap(a, kRows, kDepth, 2, gg::kTileM, gg::kTileK);
  p.b = MatrixMap(b, kGroups * kColumns, kDepth, 2, gg::kTileN, gg::kTileK);
  if (bug == gg::kWrongSwizzleInMap) emulator::ForceTensorMapSwizzle(&p.b, Swizzle::kNone);
  p.offsets = DeviceArray(problem.offsets, "offsets");
  p.groups = kGroups;
  p.n = kColumns;
  p.k = kDepth;
  p.c = UninitializedArray<uint16_t>(kRows * kColumns, "C");
  p.done = DeviceArray(std::vector<uint32_t>(kGroups, 0), "done");
  p.sums = UninitializedArray<float>(kGroups, "sums");
  void* another_stream = runtime::CreateStream(0).value();
  MOK_CHECK(Launch(gg::GroupedGemmKernel(bug), p, {.blocks = 2, .name = "grouped_gemm"}).ok());
  MOK_CHECK(Launch(gg::SumGroupsKernel(bug), p,
                   {.blocks = kGroups, .registers = 64, .stream = another_stream, .name = "sum"})
                .ok());
  return RunAndCompare([&] { return Matches(p); });
}

TEST(GroupedGemmSm90Test, EveryPlantedBugIsFlagged) {
  ExpectEveryBugFlagged(RunVariant, gg::kBugCount);
}

TEST(GroupedGemmSm90Test, ManyInterleavings) {
  for (uint64_t seed = 4; seed < 10; ++seed) {
    const Outcome outcome = RunVariant(gg::kCorrect, {seed, 0.05 * (seed - 3)});
    EXPECT_EQ(outcome.kind, "ok") << outcome.text;
  }
}

TEST(GroupedGemmSm90Test, StallReportNamesTheBarrier) {
  const Outcome outcome = RunVariant(gg::kBytesTooMany, {0, 0.1});
  EXPECT_EQ(outcome.kind, "livelock");  // the consumer kernel spins
  EXPECT_NE(outcome.text.find("full[0]"), std::string::npos) << outcome.text;
  EXPECT_NE(outcome.text.find("transactions 1024"), std::string::npos) << outcome.text;
}

}  // namespace
}  // namespace mok::testing
