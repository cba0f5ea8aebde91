// The grouped-GEMM kernel in the emulator: random shapes with tails everywhere, planted bugs,
// equality of bits.
#include "mok_gemm/sm90/grouped_gemm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "mok_core/device/runtime.h"
#include "mok_core/emulator/emulator.h"
#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_gemm/sm90/emulated_gemm_test.h"
#include "mok_gemm/sm90/gemm_test_problem.h"
#include "mok_gemm/sm90/grouped_gemm_test_kernels.h"

namespace mok::testing {
namespace {

constexpr auto kStore = GemmEpilogue::kStore, kSwiGlu = GemmEpilogue::kSwiGlu;
constexpr auto kNatural = ColumnOrder::kNatural, kPermuted = ColumnOrder::kPermuted;

void Launch(const GemmVariant& variant, const GroupedGemmProblem& problem, uint32_t num_blocks) {
  auto params = MakeGroupedGemmParams(problem, variant.kernel);
  MOK_CHECK(params.ok()) << params.status();
  params->max_panel_blocks = 2;
  params->wait = EmulatedWaitParams();
  const Status launched = LaunchGroupedGemm(variant.kernel, *params, {.num_blocks = num_blocks});
  MOK_CHECK(launched.ok()) << launched;
}

Outcome RunVariant(const GemmVariant& variant, const GemmTestProblem& test, uint32_t num_blocks) {
  test.Poison();
  Launch(variant, test.problem(), num_blocks);
  return RunAndExplain([&] { return test.Compare(1 << 20, 1); });
}

GemmTestSpec RandomSpec(GemmEpilogue epilogue, ColumnOrder order, uint32_t seed) {
  RandomSizes random(seed);
  GemmTestSpec spec;
  spec.epilogue = epilogue;
  spec.k = 8 * (2 * random.Between(0, 15) + 1);
  spec.width =
      (order == kPermuted ? 32 : 8) * (2 * random.Between(0, order == kPermuted ? 2 : 8) + 1);
  spec.counts = random.Counts(300);
  spec.row_gap = random.Between(0, 3);
  spec.stride_extra = 8 * random.Between(0, 2);
  spec.swiglu_limit = random.Coin() ? kNoLimit : 0.5f;
  spec.seed = seed;
  return spec;
}

TEST(GroupedGemmTest, RandomShapesWithTails) {
  uint32_t seed = 1;
  for (ColumnOrder order : {kNatural, kPermuted}) {
    for (GemmEpilogue epilogue : {kStore, kSwiGlu}) {
      for (auto make : {SmallVariant, OneWarpgroupVariant}) {
        for (int repeat = 0; repeat < 5; ++repeat, ++seed) {
          const GemmVariant variant = make(order, epilogue);
          const GemmTestSpec spec = RandomSpec(epilogue, order, seed);
          SCOPED_TRACE(StrCat(variant.name, " ", spec.ToString()));
          StartCase(InterleavingOf(seed));
          const GemmTestProblem test(spec);
          const Outcome outcome = RunVariant(variant, test, 1 + seed % 3);
          EXPECT_EQ(outcome.kind, "ok") << outcome.text;
        }
      }
    }
  }
}

TEST(GroupedGemmTest, ProductionTileSizes) {
  for (ColumnOrder order : {kNatural, kPermuted}) {
    for (GemmEpilogue epilogue : {kStore, kSwiGlu}) {
      GemmTestSpec spec = RandomSpec(epilogue, order, 77);
      spec.counts = {130, 40};
      spec.k = 6 * 64 + 8;  // more K blocks than stages
      spec.width = order == kPermuted ? 288 : 264;
      SCOPED_TRACE(spec.ToString());
      StartCase({5, 0.1});
      const GemmTestProblem test(spec);
      const Outcome outcome = RunVariant(DefaultVariant(order, epilogue), test, 2);
      EXPECT_EQ(outcome.kind, "ok") << outcome.text;
    }
  }
}

// Tails in every dimension, a short tile, a full one, more K blocks than stages, two tiles a block.
GemmTestSpec BugSpec(GemmEpilogue epilogue) {
  GemmTestSpec spec;
  spec.epilogue = epilogue;
  spec.counts = {40, 150};
  spec.k = 4 * 64 + 24;
  spec.width = 72;
  spec.row_gap = 3;
  spec.stride_extra = 8;
  spec.swiglu_limit = kNoLimit;
  return spec;
}

TEST(GroupedGemmTest, EveryPlantedBugIsFlagged) {
  ExpectEveryBugFlagged(
      [](int bug, const Interleaving& interleaving) {
        const GemmVariant variant = BuggyVariant(static_cast<GemmBug>(bug));
        StartCase(interleaving);
        const GemmTestProblem test(BugSpec(variant.kernel.epilogue));
        return RunVariant(variant, test, 2);
      },
      static_cast<int>(GemmBug::kCount));
}

std::vector<uint16_t> Bits(const GemmVariant& variant, const GemmTestSpec& spec,
                           uint32_t num_blocks) {
  const GemmTestProblem test(spec);
  const Outcome outcome = RunVariant(variant, test, num_blocks);
  EXPECT_EQ(outcome.kind, "ok") << outcome.text;
  return test.Results();
}

TEST(GroupedGemmTest, BitsDependOnTheElementOnly) {
  for (GemmEpilogue epilogue : {kStore, kSwiGlu}) {
    GemmTestSpec spec = BugSpec(epilogue);
    spec.width = 96;
    spec.row_gap = 0;
    StartCase({0, 0.1});
    const std::vector<uint16_t> expected = Bits(SmallVariant(kNatural, epilogue), spec, 1);
    // Grid size and interleaving.
    for (uint32_t num_blocks : {2u, 3u, 7u}) {
      StartCase({num_blocks, 0.05 * num_blocks});
      EXPECT_EQ(Bits(SmallVariant(kNatural, epilogue), spec, num_blocks), expected);
    }
    // Order of columns in shared memory, tile sizes.
    EXPECT_EQ(Bits(SmallVariant(kPermuted, epilogue), spec, 2), expected);
    EXPECT_EQ(Bits(OneWarpgroupVariant(kNatural, epilogue), spec, 2), expected);
    EXPECT_EQ(Bits(DefaultVariant(kPermuted, epilogue), spec, 2), expected);
  }
}

// h for given g and u: one row, whose only nonzero element selects g and u out of the weights.
std::vector<float> HiddenOf(const std::vector<float>& gate, const std::vector<float>& up,
                            float limit) {
  constexpr int kDepth = 8, kWidth = 32;
  auto device = [](const auto& values, const char* name) {
    const size_t bytes = values.size() * sizeof values[0];
    void* memory = runtime::AllocateDevice(0, bytes, name).value();
    MOK_CHECK(runtime::CopyToDevice(memory, values.data(), bytes).ok());
    return memory;
  };
  auto weights = [&](const std::vector<float>& first, const char* name) {
    std::vector<BFloat16> values(kWidth * kDepth, BFloat16{0});
    for (size_t n = 0; n < first.size(); ++n) values[n * kDepth] = RoundToBFloat16(first[n]);
    return static_cast<const BFloat16*>(device(values, name));
  };
  std::vector<BFloat16> a(kDepth, BFloat16{0});
  a[0] = RoundToBFloat16(1.0f);
  const std::vector<BFloat16> poison(kWidth, BFloat16{0xFFFF});
  GroupedGemmProblem problem;
  problem.epilogue = kSwiGlu;
  problem.a = static_cast<const BFloat16*>(device(a, "A"));
  problem.rows = 1;
  problem.k = problem.a_stride = kDepth;
  problem.expert_begin = static_cast<const int32_t*>(device(std::vector<int32_t>{0}, "begin"));
  problem.expert_count = static_cast<const int32_t*>(device(std::vector<int32_t>{1}, "count"));
  problem.experts = 1;
  problem.weights = weights(gate, "gate weights");
  problem.weights_up = weights(up, "up weights");
  problem.width = problem.out_stride = kWidth;
  problem.out = static_cast<BFloat16*>(device(poison, "h"));
  problem.gate = static_cast<BFloat16*>(device(poison, "g"));
  problem.up = static_cast<BFloat16*>(device(poison, "u"));
  problem.swiglu_limit = limit;
  Launch(SmallVariant(kPermuted, kSwiGlu), problem, 1);
  const emulator::Report report = emulator::Run();
  EXPECT_TRUE(report.ok) << report.text;
  std::vector<BFloat16> hidden(kWidth);
  MOK_CHECK(runtime::CopyToHost(hidden.data(), problem.out, kWidth * sizeof(BFloat16)).ok());
  std::vector<float> values;
  for (size_t i = 0; i < gate.size(); ++i) values.push_back(ToFloat(hidden[i]));
  return values;
}

// The same conventions as the host worker and PyTorch: a NaN or an infinity stays visible, in its
// own column only; a value equal to the limit is not changed.
TEST(GroupedGemmTest, SwiGluOfSpecialValues) {
  constexpr float kInf = kNoLimit, kNan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> gate = {kInf, -kInf, kNan, 1.0f, 0.0f, -0.0f, 200.0f, -200.0f, 2.0f};
  const std::vector<float> up = {1.0f, 1.0f, 1.0f, kNan, 4.0f, 4.0f, -3.0f, -3.0f, -kInf};
  StartCase({0, 0.1});
  const std::vector<float> plain = HiddenOf(gate, up, kNoLimit);
  EXPECT_EQ(plain[0], kInf);
  EXPECT_TRUE(std::isnan(plain[1]));
  EXPECT_TRUE(std::isnan(plain[2]));
  EXPECT_TRUE(std::isnan(plain[3]));
  EXPECT_EQ(plain[4], 0.0f);
  EXPECT_EQ(plain[5], 0.0f);
  EXPECT_EQ(plain[6], -600.0f);
  EXPECT_EQ(plain[7], 0.0f);
  EXPECT_EQ(plain[8], -kInf);
  const std::vector<float> clamped = HiddenOf(gate, up, 2.0f);
  const float silu_of_limit = 2.0f / (1.0f + std::exp(-2.0f));
  EXPECT_NEAR(clamped[0], silu_of_limit, 0x1p-7);
  EXPECT_TRUE(std::isnan(clamped[1]));
  EXPECT_TRUE(std::isnan(clamped[2]));
  EXPECT_TRUE(std::isnan(clamped[3]));
  EXPECT_NEAR(clamped[6], -2.0f * silu_of_limit, 0x1p-6);
  EXPECT_EQ(clamped[7], 0.0f);
  EXPECT_NEAR(clamped[8], -2.0f * silu_of_limit, 0x1p-6);
}

// Without them the kernel would read a null flag as soon as something has to wait.
TEST(GroupedGemmTest, ALaunchWithoutAWaitIsRefused) {
  StartCase({0, 0.1});
  const GemmVariant variant = SmallVariant(kNatural, kStore);
  const GemmTestProblem test(BugSpec(kStore));
  auto params = MakeGroupedGemmParams(test.problem(), variant.kernel);
  ASSERT_TRUE(params.ok()) << params.status();
  const DeviceWaitParams complete = EmulatedWaitParams();
  const DeviceWaitParams kIncomplete[] = {{},
                                          {nullptr, complete.abort_flag, complete.timeout_ns, 0},
                                          {complete.record, nullptr, complete.timeout_ns, 0},
                                          {complete.record, complete.abort_flag, 0, 0}};
  for (const DeviceWaitParams& wait : kIncomplete) {
    params->wait = wait;
    const Status status = LaunchGroupedGemm(variant.kernel, *params, {.num_blocks = 1});
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("params.wait"), std::string::npos) << status;
  }
}

// Their maps and outputs are of one order of columns and one epilogue.
TEST(GroupedGemmTest, ParametersOfAnotherKernelAreRefused) {
  StartCase({0, 0.1});
  const GemmTestProblem test(BugSpec(kStore));
  auto params = MakeGroupedGemmParams(test.problem(), SmallVariant(kNatural, kStore).kernel);
  ASSERT_TRUE(params.ok()) << params.status();
  params->wait = EmulatedWaitParams();
  for (const GemmVariant& other : {SmallVariant(kPermuted, kStore), SmallVariant(kNatural, kSwiGlu),
                                   OneWarpgroupVariant(kNatural, kStore)}) {
    const Status status = LaunchGroupedGemm(other.kernel, *params, {.num_blocks = 1});
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << other.name;
  }
  const auto swiglu = MakeGroupedGemmParams(test.problem(), SmallVariant(kNatural, kSwiGlu).kernel);
  EXPECT_EQ(swiglu.status().message(), "epilogue = 0: expected the kernel's, 1");
}

TEST(GroupedGemmTest, NoRowsAtAll) {
  StartCase({0, 0.1});
  GemmTestSpec spec = BugSpec(kSwiGlu);
  spec.counts = {0, 0, 0};
  const GemmTestProblem test(spec);
  const Outcome outcome = RunVariant(SmallVariant(kNatural, kSwiGlu), test, 2);
  EXPECT_EQ(outcome.kind, "ok") << outcome.text;
}

}  // namespace
}  // namespace mok::testing
