// The whole backward in the emulator, after the forward: small layers on one to three ranks against
// float64 and the host engine, and the determinism contract.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "mok_core/device/runtime.h"
#include "mok_core/emulator/emulator.h"
#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_megakernel/sm90/backward_test_kernels.h"
#include "mok_megakernel/sm90/forward_test_kernels.h"
#include "mok_megakernel/sm90/testing/backward_cases.h"
#include "mok_megakernel/sm90/testing/device_backward.h"
#include "mok_megakernel/sm90/testing/device_layer.h"

namespace mok::testing {
namespace {

// Between two correct engines that round differently.
constexpr double kTensorTolerance = 5e-3;
constexpr double kRouterTolerance = 1e-2;

void ExpectCloseToHost(const LayerData& data, const LayerResult& result) {
  const LayerResult host = RunLayer(data, {});
  const auto error = [](const Tensor& actual, const Tensor& expected) {
    return RelativeError(actual, expected.ToDoubles());
  };
  EXPECT_LE(error(result.d_x, host.d_x), kTensorTolerance);
  EXPECT_LE(error(result.d_topk_weight, host.d_topk_weight), kRouterTolerance);
  EXPECT_LE(error(result.d_shared_scale, host.d_shared_scale), kRouterTolerance);
  EXPECT_LE(error(result.d_gate, host.d_gate), kTensorTolerance);
  EXPECT_LE(error(result.d_up, host.d_up), kTensorTolerance);
  EXPECT_LE(error(result.d_down, host.d_down), kTensorTolerance);
  if (data.spec.shared_intermediate == 0) return;
  for (size_t rank = 0; rank < host.d_shared_gate.size(); ++rank) {
    EXPECT_LE(error(result.d_shared_gate[rank], host.d_shared_gate[rank]), kTensorTolerance);
    EXPECT_LE(error(result.d_shared_up[rank], host.d_shared_up[rank]), kTensorTolerance);
    EXPECT_LE(error(result.d_shared_down[rank], host.d_shared_down[rank]), kTensorTolerance);
  }
}

// All interleavings give the same bits, and these are right.
LayerResult ExpectBackward(const LayerSpec& spec, const BackwardCase& options,
                           const std::string& label) {
  SCOPED_TRACE(label);
  const LayerData data(spec);
  LayerResult first;
  for (const Interleaving& interleaving : kInterleavings) {
    const LayerResult result = RunBackward(data, options, interleaving);
    if (interleaving.seed == 0) first = result;
    ExpectSameBits(first, result, StrCat("seed ", interleaving.seed));
  }
  ExpectMatchesReference(data, first);
  ExpectCloseToHost(data, first);
  return first;
}

TEST(BackwardTest, SmallLayer) { ExpectBackward(SmallLayer(), TwoBlocks(), "small layer"); }

TEST(BackwardTest, WidthsThatAreMultiplesOf32UsePermutedColumns) {
  LayerSpec spec = SmallLayer();
  spec.hidden = 96;
  spec.intermediate = 64;
  spec.shared_intermediate = 32;
  BackwardCase options = TwoBlocks();
  options.backward.kept_macrobatches = 0;  // repeats the forward's GateUp
  ExpectBackward(spec, options, "permuted");
}

// Where the shared expert's last tiles do TokenReduce's work, all bits stay as they are.
TEST(BackwardTest, FusedReductionHasTheSameBits) {
  LayerSpec spec = SmallLayer();
  spec.shared_intermediate = 24;
  spec.hidden = 200;  // four tiles, the last of 8 columns
  for (const int topk : {1, 5}) {
    spec.topk = topk;
    spec.shared_scale = topk == 1;
    spec.tokens = {150, 0, 70};  // the last block's second warpgroup has some rows
    spec.experts = {2, 1, 1};
    spec.route = [](int64_t token, int k) -> int64_t {
      return (token + k) % 3 == 0 ? -1 : (token + k) % 4;
    };
    const LayerData data(spec);
    for (const bool own_devices : {true, false}) {
      BackwardCase options = TwoBlocks();
      options.layer.own_devices = own_devices;
      options.layer.fused_backward_reduce = 0;
      const LayerResult expected = RunBackward(data, options);
      ExpectCloseToHost(data, expected);
      for (const int32_t width : {1, 3}) {
        options.layer.fused_backward_reduce = width;
        for (const Interleaving& interleaving : kInterleavings) {
          ExpectSameBits(expected, RunBackward(data, options, interleaving, width == 3),
                         StrCat(topk, " routes, width ", width, ", seed ", interleaving.seed));
        }
      }
    }
  }
}

// More than one tile of every kind.
TEST(BackwardTest, SeveralTiles) {
  LayerSpec spec = SmallLayer();
  spec.tokens = {30, 0};
  spec.experts = {1, 1};
  spec.hidden = 264;
  spec.intermediate = 272;
  ExpectBackward(spec, TwoBlocks(), "two tiles");
}

TEST(BackwardTest, SharedExpertScaleAndClamp) {
  LayerSpec spec = SmallLayer();
  spec.shared_intermediate = 24;
  ExpectBackward(spec, TwoBlocks(), "shared expert");
  spec.tokens = {150, 3};
  spec.shared_scale = true;
  ExpectBackward(spec, TwoBlocks(), "shared scale");
}

TEST(BackwardTest, OneRank) {
  ExpectBackward(LayerOfOneRank(), TwoBlocks(), "one rank, two token blocks");
}

TEST(BackwardTest, ThreeRanksUnevenTokensAndExperts) {
  ExpectBackward(UnevenLayer(), TwoBlocks(), "uneven");
  LayerSpec spec = UnevenSharedLayer();
  ExpectBackward(spec, TwoBlocks(), "a rank without experts");
  spec.tokens = {0, 0, 0};
  const LayerResult empty = RunBackward(LayerData(spec), TwoBlocks());
  for (const Tensor* gradient : {&empty.d_gate, &empty.d_up, &empty.d_down}) {
    for (int64_t i = 0; i < gradient->size(); ++i) ASSERT_EQ(gradient->Get(i), 0);
  }
}

TEST(BackwardTest, MissingAndRepeatedRoutes) {
  BackwardCase options = TwoBlocks();
  options.layer.id_bytes = 4;
  ExpectBackward(LayerWithRepeatedRoutes(), options, "routes 3, 3, -1, -1");
}

TEST(BackwardTest, SeveralMacrobatches) {
  for (const int64_t macrobatch : {1, 2}) {
    for (const int kept : {0, 1}) {
      BackwardCase options = {WithRing(1, macrobatch), {}};
      options.backward.kept_macrobatches = kept;
      ExpectBackward(LongLayer(), options, StrCat("macrobatch of ", macrobatch, ", kept ", kept));
    }
  }
}

// Where weight gradients of the shared expert come in the order changes no bit.
TEST(BackwardTest, SharedWeightGradientsComeEarlyOrLate) {
  LayerSpec spec = LongLayer();
  spec.shared_intermediate = 24;
  const LayerData data(spec);
  LayerResult results[2];
  for (const bool early : {false, true}) {
    const BackwardCase options = {WithRing(1, early ? 1 : 2), {}};
    results[early] = ExpectBackward(spec, options, early ? "early" : "late");
    const DeviceLayer layer(data, options.layer, SmallForwardKernel);
    const DeviceBackward backward(layer, options.backward, SmallBackwardKernel);
    EXPECT_EQ(backward.params(1).shape.program.early_shared_weight_grads, early);
  }
  ExpectSameBits(results[0], results[1], "early and late");
}

// bf16 and fp32 gradients, written and accumulated; experts without rows.
TEST(BackwardTest, WeightGradients) {
  LayerSpec spec = SmallLayer();
  spec.shared_intermediate = 8;
  spec.route = [](int64_t token, int k) { return (token + k) % 3; };  // expert 3 has no rows
  const LayerData data(spec);
  const LayerResult exact = RunBackward(data, TwoBlocks());
  ExpectMatchesReference(data, exact);
  const auto matrix = spec.hidden * spec.intermediate;
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    for (const bool accumulate : {false, true}) {
      SCOPED_TRACE(StrCat(DTypeName(dtype), accumulate ? ", accumulated" : ""));
      BackwardCase options = TwoBlocks();
      options.backward.grad_dtype = dtype;
      options.backward.accumulate = accumulate;
      options.backward.initial_grad = 0.375;
      const LayerResult result = RunBackward(data, options, {3, 0.5}, true);
      EXPECT_EQ(result.d_x, exact.d_x);
      const auto expect = [&](const Tensor& actual, const Tensor& sums, const char* name) {
        for (int64_t i = 0; i < sums.size(); ++i) {
          const auto sum = static_cast<float>(sums.Get(i));
          Tensor rounded(dtype, 1);
          rounded.Set(0, accumulate ? 0.375f + sum : sum);
          ASSERT_EQ(actual.Get(i), rounded.Get(0)) << name << " " << i;
        }
      };
      expect(result.d_gate, exact.d_gate, "d_gate");
      expect(result.d_up, exact.d_up, "d_up");
      expect(result.d_down, exact.d_down, "d_down");
      for (size_t rank = 0; rank < 2; ++rank) {
        expect(result.d_shared_gate[rank], exact.d_shared_gate[rank], "d_shared_gate");
        expect(result.d_shared_down[rank], exact.d_shared_down[rank], "d_shared_down");
      }
      for (int64_t i = 3 * matrix; i < 4 * matrix; ++i) {
        ASSERT_EQ(result.d_gate.Get(i), accumulate ? 0.375 : 0.0) << "expert without rows";
      }
    }
  }
}

TEST(BackwardTest, WeightGradientsThatNobodyWants) {
  LayerSpec spec = LongLayer();
  spec.shared_intermediate = 8;
  const LayerData data(spec);
  BackwardCase options = TwoBlocks();
  options.layer.forward.macrobatch_rows = 256;
  const LayerResult expected = RunBackward(data, options);
  options.backward.has_weight_grads = false;
  const LayerResult result = RunBackward(data, options);
  EXPECT_EQ(result.d_x, expected.d_x);
  EXPECT_EQ(result.d_topk_weight, expected.d_topk_weight);
}

TEST(BackwardTest, BitsDoNotDependOnHowItRuns) {
  const LayerData data(LongLayer());
  const LayerResult expected = RunBackward(data, TwoBlocks());
  const auto expect_same = [&](const BackwardCase& options, const std::string& label) {
    ExpectSameBits(expected, RunBackward(data, options, {5, 0.1}), label);
  };
  ForEachWayToRun([&](const DeviceLayerOptions& options, const std::string& label) {
    expect_same({options, {}}, label);
  });
  for (const int64_t window : {1, 2, 3}) {
    BackwardCase options = {WithRing(1, 4), {}};
    options.layer.d_x_window_blocks = window;
    expect_same(options, StrCat("window of ", window));
  }
  BackwardCase recomputed = TwoBlocks();
  recomputed.backward.kept_macrobatches = 0;
  expect_same(recomputed, "everything computed again");
}

TEST(BackwardTest, BitsDoNotDependOnEpSize) {
  const std::vector<LayerSpec> specs = OneBatchOnRanks();
  const LayerResult expected = RunBackward(LayerData(specs[0]), TwoBlocks());
  for (const LayerSpec& spec : specs) {
    ExpectSameBits(expected, RunBackward(LayerData(spec), TwoBlocks()),
                   StrCat(spec.ep_size(), " ranks"));
  }
}

// Ranks that share a device and run one after the other.
TEST(BackwardTest, VirtualRanks) {
  const std::vector<LayerSpec> specs = OneBatchOnEightAndTwoRanks();
  BackwardCase options = TwoBlocks();
  options.layer.own_devices = false;
  const LayerResult result = ExpectBackward(specs[0], options, "eight virtual ranks");
  ExpectSameBits(result, RunBackward(LayerData(specs[1]), TwoBlocks()), "two ranks");
}

// Schedule kernel and both passes in one stream: the host never learns how many rows there are.
TEST(BackwardTest, ScheduleOfTheDevice) {
  BackwardCase options = TwoBlocks();
  options.layer.forward.macrobatch_rows = 256;
  const LayerData data(LongLayer());
  const LayerResult expected = RunBackward(data, options);
  options.layer.device_schedule = true;
  ExpectSameBits(expected, RunBackward(data, options, {3, 0.5}), "two GPUs");
  options.layer.own_devices = false;
  ExpectSameBits(expected, RunBackward(data, options, {3, 0.5}), "two virtual ranks");
}

// Every kind of task that consumers have is in the trace.
TEST(BackwardTest, Trace) {
  LayerSpec spec = SmallLayer();
  spec.shared_intermediate = 8;
  const LayerData data(spec);
  StartCase({0, 0.1});
  DeviceLayer layer(data, TwoBlocks().layer, SmallForwardKernel);
  DeviceBackward backward(layer, {.kept_macrobatches = 0, .trace_capacity = 200},
                          SmallTracedBackwardKernel);
  ASSERT_EQ(layer.LaunchAll(), OkStatus());
  ASSERT_EQ(backward.LaunchAll(), OkStatus());
  RunQueued();
  const std::string summary = backward.trace().SummaryOfConsumers();
  for (const TaskKind kind :
       {TaskKind::kRecomputeGateUp, TaskKind::kDownGrad, TaskKind::kInputGrad,
        TaskKind::kWeightGradDown, TaskKind::kWeightGradGateUp, TaskKind::kSharedRecomputeGateUp,
        TaskKind::kSharedDownGrad, TaskKind::kSharedInputGrad, TaskKind::kSharedWeightGradDown,
        TaskKind::kSharedWeightGradGateUp, TaskKind::kTokenReduce}) {
    EXPECT_NE(summary.find(StrCat(TaskKindName(kind), " ")), std::string::npos) << summary;
  }
  EXPECT_NE(summary.find(" GHz"), std::string::npos) << summary;
}

TEST(BackwardTest, DeadRankIsNamed) {
  const LayerData data(SmallLayer());
  for (const Interleaving& interleaving : kInterleavings) {
    StartCase(interleaving, true);
    DeviceLayer layer(data, TwoBlocks().layer, SmallForwardKernel);
    DeviceBackward backward(layer, TwoBlocks().backward, SmallBackwardKernel);
    ASSERT_EQ(layer.LaunchAll(), OkStatus());
    ASSERT_EQ(backward.Launch(1, PassMode::kWhole, SmallBackwardKernel(ColumnOrder::kNatural)),
              OkStatus());  // rank 0 is dead
    ASSERT_EQ(runtime::Synchronize(), OkStatus()) << "the kernel ends";
    ExpectNamesRankZero(backward.CheckRecords(), 2);
  }
}

TEST(BackwardTest, ErrorsNameTheArgument) {
  StartCase({0, 0.1});
  const LayerData data(SmallLayer());
  const DeviceLayer layer(data, TwoBlocks().layer, SmallForwardKernel);
  const DeviceBackward backward(layer, {}, SmallBackwardKernel);
  const DeviceLayer::Rank& rank = layer.rank(0);
  const auto error = [&](const std::function<void(BackwardArguments&)>& change) {
    BackwardArguments arguments = backward.arguments(0);
    change(arguments);
    const StatusOr<BackwardParams> params = MakeBackwardParams(
        rank.shape, rank.config, SmallBackwardKernel(rank.config.order), arguments);
    return params.ok() ? std::string() : std::string(params.status().message());
  };
  EXPECT_EQ(error([](BackwardArguments&) {}), "");
  EXPECT_EQ(error([](BackwardArguments& a) { a.tokens.d_out = nullptr; }),
            "d_out: expected a pointer, got null");
  EXPECT_EQ(error([](BackwardArguments& a) { a.tokens.id_bytes = 2; }),
            "topk_idx_bytes: expected 4 or 8, got 2");
  EXPECT_EQ(error([](BackwardArguments& a) { a.kept_macrobatches = 2; }),
            "kept_macrobatches: expected 0 to 1, got 2");
  EXPECT_EQ(error([](BackwardArguments& a) { a.d_routed.dtype = DType::kE4m3; }),
            "d_routed.dtype: expected bf16 or fp32, got e4m3");
  EXPECT_EQ(error([](BackwardArguments& a) { a.tokens.d_shared_scale = a.tokens.d_topk_weight; }),
            "d_shared_scale: expected null without shared_scale");
}

}  // namespace
}  // namespace mok::testing
