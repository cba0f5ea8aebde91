// The backward's tiles in the emulator: random shapes with tails everywhere and NaN behind valid
// rows, weight gradients in all their forms, planted bugs, equality of bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

#include "mok_core/device/runtime.h"
#include "mok_core/emulator/emulator.h"
#include "mok_gemm/sm90/backward_gemm_test_kernels.h"
#include "mok_gemm/sm90/backward_test_problem.h"
#include "mok_gemm/sm90/grouped_gemm.h"

namespace mok::testing {
namespace {

constexpr float kNoLimit = std::numeric_limits<float>::infinity();
constexpr uint64_t kTimeoutNs = 1'000'000'000;
constexpr uint32_t kAll =
    kProductDownGrad | kProductInputGrad | kProductWeightGrad | kProductGateUp;

// A scheduler setting: seed 0 is orderly; then late, rare and early asynchronous effects.
struct Interleaving {
  uint64_t seed;
  double async_probability;
};
constexpr Interleaving kInterleavings[] = {{0, 0.1}, {1, 0.0}, {2, 0.02}, {3, 0.9}};

void Configure(const Interleaving& interleaving) {
  emulator::Options options;
  options.seed = interleaving.seed;
  options.async_probability = interleaving.async_probability;
  options.symbolize = false;
  emulator::Configure(options);
}

DeviceWaitParams WaitParams() {
  static void* const record =
      runtime::AllocateMappedHost(sizeof(DeviceWaitRecord), "wait_record").value();
  static void* const abort_flag = [] {
    void* const flag = runtime::AllocateDevice(0, sizeof(uint32_t), "abort_flag").value();
    MOK_CHECK(runtime::Fill(flag, 0, sizeof(uint32_t)).ok());
    return flag;
  }();
  return {static_cast<DeviceWaitRecord*>(record), static_cast<uint32_t*>(abort_flag), kTimeoutNs,
          0};
}

void Launch(const BackwardVariant& variant, const BackwardGemmParams& params, uint32_t num_blocks) {
  runtime::LaunchConfig config;
  config.grid = {num_blocks, 1, 1};
  config.block = {variant.kernel.threads, 1, 1};
  config.shared_bytes = variant.kernel.shared_bytes;
  config.registers_per_thread = kSm90LaunchRegisters;
  config.name = "backward_gemm";
  const Status launched =
      runtime::LaunchKernelAddress(variant.kernel.address, config, &params, sizeof params);
  MOK_CHECK(launched.ok()) << launched;
}

// "" or the kind of failure, and its text.
struct Outcome {
  std::string kind, text;
};
Outcome RunProducts(const BackwardVariant& variant, const BackwardTestProblem& test,
                    uint32_t products, uint32_t num_blocks) {
  test.Poison();
  for (int piece = 0; piece < test.pieces(); ++piece) {
    // What is not a weight gradient is complete after the first piece.
    BackwardGemmParams params =
        test.Params(piece == 0 ? products : products & kProductWeightGrad, piece);
    params.gate_up.max_panel_blocks = 2;
    params.gate_up.wait = WaitParams();
    Launch(variant, params, num_blocks);
    const emulator::Report report = emulator::Run();
    if (!report.ok) return {report.kind, report.text};
  }
  const std::string error = test.Compare(products, 1 << 20, 1);
  return {error.empty() ? "" : "mismatch", error};
}

BackwardTestSpec RandomSpec(uint32_t seed) {
  std::mt19937 random(seed);
  auto between = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<uint32_t>(high - low + 1));
  };
  BackwardTestSpec spec;
  spec.hidden = 8 * (2 * between(0, 17) + 1);
  spec.intermediate = 8 * (2 * between(0, 17) + 1);
  // One expert without rows, one of at most 64 (one warpgroup works), one of any size.
  spec.counts = {between(1, 64), 0, between(1, 200)};
  std::shuffle(spec.counts.begin(), spec.counts.end(), random);
  spec.row_gap = between(0, 3);
  spec.swiglu_limit = between(0, 1) == 0 ? kNoLimit : 0.75f;
  spec.one_weight = between(0, 3) == 0;
  spec.gate_form = between(0, 1) == 0;
  spec.out_dtype = between(0, 1) == 0 ? DType::kBf16 : DType::kFp32;
  spec.accumulate = between(0, 1) == 0;
  if (between(0, 1) == 0) spec.piece_rows = 64;
  spec.seed = seed;
  return spec;
}

TEST(BackwardGemmTest, RandomShapesWithTails) {
  uint32_t seed = 1;
  for (auto make : {TwoStageVariant, OneWarpgroupBackwardVariant, DefaultBackwardVariant}) {
    for (int repeat = 0; repeat < 6; ++repeat, ++seed) {
      const BackwardVariant variant = make();
      const BackwardTestSpec spec = RandomSpec(seed);
      SCOPED_TRACE(StrCat(variant.name, " ", spec.ToString()));
      Configure({seed % 4, 0.02 + 0.2 * (seed % 5)});
      const BackwardTestProblem test(spec, variant.tile);
      const Outcome outcome = RunProducts(variant, test, kAll, 1 + seed % 3);
      EXPECT_EQ(outcome.kind, "") << outcome.text;
    }
  }
}

// Tiles wider than half a tile and taller than one warpgroup, in every dimension.
BackwardTestSpec WideSpec() {
  BackwardTestSpec spec;
  spec.counts = {40, 0, 150};
  spec.hidden = 3 * 64 + 24;
  spec.intermediate = 256 + 72;
  spec.row_gap = 3;
  return spec;
}

TEST(BackwardGemmTest, WeightGradientsInAllForms) {
  for (DType dtype : {DType::kBf16, DType::kFp32}) {
    for (bool accumulate : {false, true}) {
      for (int piece_rows : {64, 1 << 30}) {
        for (bool gate_form : {false, true}) {
          BackwardTestSpec spec = WideSpec();
          spec.out_dtype = dtype;
          spec.accumulate = accumulate;
          spec.piece_rows = piece_rows;
          spec.gate_form = gate_form;
          SCOPED_TRACE(spec.ToString());
          Configure({0, 0.1});
          const BackwardVariant variant = TwoStageVariant();
          const BackwardTestProblem test(spec, variant.tile);
          const Outcome outcome = RunProducts(variant, test, kProductWeightGrad, 2);
          EXPECT_EQ(outcome.kind, "") << outcome.text;
        }
      }
    }
  }
}

std::vector<uint32_t> Bits(const BackwardVariant& variant, const BackwardTestSpec& spec,
                           uint32_t num_blocks) {
  const BackwardTestProblem test(spec, variant.tile);
  const Outcome outcome = RunProducts(variant, test, kAll, num_blocks);
  EXPECT_EQ(outcome.kind, "") << outcome.text;
  return test.Results(kAll);
}

TEST(BackwardGemmTest, BitsDependOnTheElementOnly) {
  BackwardTestSpec spec = WideSpec();
  spec.out_dtype = DType::kFp32;
  Configure({0, 0.1});
  const std::vector<uint32_t> expected = Bits(TwoStageVariant(), spec, 1);
  // Grid size and interleaving, stages, rows before the expert's, cuts of weight gradients.
  for (uint32_t num_blocks : {2u, 3u}) {
    Configure({num_blocks, 0.05 * num_blocks});
    EXPECT_EQ(Bits(TwoStageVariant(), spec, num_blocks), expected);
  }
  EXPECT_EQ(Bits(DefaultBackwardVariant(), spec, 2), expected);
  for (int piece_rows : {64, 128}) {
    spec.piece_rows = piece_rows;
    EXPECT_EQ(Bits(TwoStageVariant(), spec, 2), expected);
  }
}

// Where each mistake matters.
struct BugCase {
  uint32_t products = kProductWeightGrad;
  BackwardTestSpec spec = WideSpec();
};
BugCase CaseOf(BackwardBug bug) {
  BugCase test;
  switch (bug) {
    case BackwardBug::kNone:
      test.products = kAll;
      break;
    case BackwardBug::kSecondRangeFromFirst:
    case BackwardBug::kStoresPaddingRows:
    case BackwardBug::kStoresTailColumns:
    case BackwardBug::kNoQuadTranspose:
      test.products = kProductInputGrad;
      break;
    case BackwardBug::kIdleSkipsProductsOnly:
    case BackwardBug::kActivationBytes:
    case BackwardBug::kActivationColumn:
    case BackwardBug::kReadsActivationsTooEarly:
    case BackwardBug::kNoSyncBeforeCopy:
    case BackwardBug::kNoFenceBeforeRelease:
    case BackwardBug::kReleasesBeforeCopy:
    case BackwardBug::kPartialOfOneLane:
    case BackwardBug::kUnweightedHidden:
      test.products = kProductDownGrad;
      break;
    case BackwardBug::kOneBarrierForAllTiles:
      test.spec.hidden = 128 + 40;  // the last tile has 40 rows
      break;
    case BackwardBug::kCarryIgnored:
    case BackwardBug::kCarryStoredToOutput:
      test.spec.piece_rows = 64;
      test.spec.accumulate = bug == BackwardBug::kCarryStoredToOutput;
      break;
    case BackwardBug::kAddsNothing:
    case BackwardBug::kOverwritesWithoutRows:
      test.spec.accumulate = true;
      break;
    default:
      break;
  }
  return test;
}

TEST(BackwardGemmTest, EveryPlantedBugIsFlagged) {
  for (int bug = 0; bug < static_cast<int>(BackwardBug::kCount); ++bug) {
    const BackwardVariant variant = BuggyBackwardVariant(static_cast<BackwardBug>(bug));
    const BugCase bug_case = CaseOf(static_cast<BackwardBug>(bug));
    std::string kinds;
    for (const Interleaving& interleaving : kInterleavings) {
      SCOPED_TRACE(StrCat("bug ", bug, " seed ", interleaving.seed));
      Configure(interleaving);
      const BackwardTestProblem test(bug_case.spec, variant.tile);
      const Outcome outcome = RunProducts(variant, test, bug_case.products, 2);
      if (bug == 0) {
        EXPECT_EQ(outcome.kind, "") << outcome.text;
      } else {
        EXPECT_NE(outcome.kind, "");
      }
      kinds += " " + (outcome.kind.empty() ? "ok" : outcome.kind);
    }
    printf("bug %2d:%s\n", bug, kinds.c_str());
  }
}

}  // namespace
}  // namespace mok::testing
