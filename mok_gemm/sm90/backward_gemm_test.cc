// The backward's tiles in the emulator: random shapes with tails everywhere and NaN behind valid
// rows, weight gradients in all their forms, planted bugs, equality of bits.
#include <gtest/gtest.h>

#include "mok_core/device/runtime.h"
#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_gemm/sm90/backward_gemm_test_kernels.h"
#include "mok_gemm/sm90/backward_test_problem.h"
#include "mok_gemm/sm90/emulated_gemm_test.h"
#include "mok_gemm/sm90/grouped_gemm.h"

namespace mok::testing {
namespace {

constexpr uint32_t kAll =
    kProductDownGrad | kProductInputGrad | kProductWeightGrad | kProductGateUp;

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

Outcome RunProducts(const BackwardVariant& variant, const BackwardTestProblem& test,
                    uint32_t products, uint32_t num_blocks) {
  test.Poison();
  for (int piece = 0; piece < test.pieces(); ++piece) {
    // What is not a weight gradient is complete after the first piece.
    BackwardGemmParams params =
        test.Params(piece == 0 ? products : products & kProductWeightGrad, piece);
    params.gate_up.max_panel_blocks = 2;
    params.gate_up.wait = EmulatedWaitParams();
    Launch(variant, params, num_blocks);
    const bool is_last = piece + 1 == test.pieces();
    const Outcome outcome =
        RunAndExplain([&] { return is_last ? test.Compare(products, 1 << 20, 1) : ""; });
    if (is_last || outcome.kind != "ok") return outcome;
  }
  return {"ok", ""};
}

BackwardTestSpec RandomSpec(uint32_t seed) {
  RandomSizes random(seed);
  BackwardTestSpec spec;
  spec.hidden = 8 * (2 * random.Between(0, 17) + 1);
  spec.intermediate = 8 * (2 * random.Between(0, 17) + 1);
  spec.counts = random.Counts(200);
  spec.row_gap = random.Between(0, 3);
  spec.swiglu_limit = random.Coin() ? kNoLimit : 0.75f;
  spec.one_weight = random.Between(0, 3) == 0;
  spec.gate_form = random.Coin();
  spec.out_dtype = random.Coin() ? DType::kBf16 : DType::kFp32;
  spec.accumulate = random.Coin();
  if (random.Coin()) spec.piece_rows = 64;
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
      StartCase(InterleavingOf(seed));
      const BackwardTestProblem test(spec, variant.tile);
      const Outcome outcome = RunProducts(variant, test, kAll, 1 + seed % 3);
      EXPECT_EQ(outcome.kind, "ok") << outcome.text;
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
          StartCase({0, 0.1});
          const BackwardVariant variant = TwoStageVariant();
          const BackwardTestProblem test(spec, variant.tile);
          const Outcome outcome = RunProducts(variant, test, kProductWeightGrad, 2);
          EXPECT_EQ(outcome.kind, "ok") << outcome.text;
        }
      }
    }
  }
}

std::vector<uint32_t> Bits(const BackwardVariant& variant, const BackwardTestSpec& spec,
                           uint32_t num_blocks) {
  const BackwardTestProblem test(spec, variant.tile);
  const Outcome outcome = RunProducts(variant, test, kAll, num_blocks);
  EXPECT_EQ(outcome.kind, "ok") << outcome.text;
  return test.Results(kAll);
}

TEST(BackwardGemmTest, BitsDependOnTheElementOnly) {
  BackwardTestSpec spec = WideSpec();
  spec.out_dtype = DType::kFp32;
  StartCase({0, 0.1});
  const std::vector<uint32_t> expected = Bits(TwoStageVariant(), spec, 1);
  // Grid size and interleaving, stages, rows before the expert's, cuts of weight gradients.
  for (uint32_t num_blocks : {2u, 3u}) {
    StartCase({num_blocks, 0.05 * num_blocks});
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
  ExpectEveryBugFlagged(
      [](int bug, const Interleaving& interleaving) {
        const BackwardVariant variant = BuggyBackwardVariant(static_cast<BackwardBug>(bug));
        const BugCase bug_case = CaseOf(static_cast<BackwardBug>(bug));
        StartCase(interleaving);
        const BackwardTestProblem test(bug_case.spec, variant.tile);
        return RunProducts(variant, test, bug_case.products, 2);
      },
      static_cast<int>(BackwardBug::kCount));
}

}  // namespace
}  // namespace mok::testing
