// The whole forward in the emulator: small layers on one to three ranks against float64 and the
// host engine, and the determinism contract.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "mok_core/device/runtime.h"
#include "mok_core/emulator/emulator.h"
#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_megakernel/sm90/forward_test_kernels.h"
#include "mok_megakernel/sm90/testing/device_layer.h"
#include "mok_megakernel/sm90/testing/small_layer.h"

namespace mok::testing {
namespace {

// Relative errors in bf16.
constexpr double kTensorTolerance = 4e-3;
constexpr double kRowTolerance = 2e-2;

Tensor RunForward(const LayerData& data, const DeviceLayerOptions& options,
                  const Interleaving& interleaving = {0, 0.1}) {
  StartCase(interleaving);
  DeviceLayer layer(data, options, SmallForwardKernel);
  EXPECT_EQ(layer.LaunchAll(), OkStatus());
  RunQueued();
  EXPECT_EQ(layer.CheckRecords(), OkStatus());
  return layer.Out();
}

void ExpectCorrect(const LayerData& data, const Tensor& out, const std::string& label) {
  const ReferenceResult reference = RunReference(ReferenceInputsOf(data));
  EXPECT_LE(RelativeError(out, reference.out), kTensorTolerance) << label;
  EXPECT_LE(WorstRowError(out, reference.out, data.spec.hidden), kRowTolerance) << label;
  const LayerResult host = RunLayer(data, {});
  EXPECT_LE(RelativeError(out, host.out.ToDoubles()), kTensorTolerance) << label;
}

// All interleavings give the same bits, and these are right.
Tensor ExpectForward(const LayerSpec& spec, const DeviceLayerOptions& options,
                     const std::string& label) {
  const LayerData data(spec);
  Tensor first;
  for (const Interleaving& interleaving : kInterleavings) {
    const Tensor out = RunForward(data, options, interleaving);
    if (first.bytes.empty()) first = out;
    EXPECT_EQ(out, first) << label << ", seed " << interleaving.seed;
  }
  ExpectCorrect(data, first, label);
  return first;
}

TEST(ForwardTest, SmallLayer) { ExpectForward(SmallLayer(), LayerOnTwoBlocks(), "small layer"); }

TEST(ForwardTest, WidthsThatAreMultiplesOf32UsePermutedColumns) {
  LayerSpec spec = SmallLayer();
  spec.hidden = 96;
  spec.intermediate = 64;
  ExpectForward(spec, LayerOnTwoBlocks(), "permuted");
  spec.shared_intermediate = 32;
  spec.shared_scale = true;
  ExpectForward(spec, LayerOnTwoBlocks(), "permuted, shared expert");
}

TEST(ForwardTest, SharedExpertScaleAndClamp) {
  LayerSpec spec = SmallLayer();
  spec.shared_intermediate = 24;
  ExpectForward(spec, LayerOnTwoBlocks(), "shared expert");
  spec.shared_scale = true;
  spec.swiglu_limit = 0.5f;
  spec.x_scale = 1;
  ExpectForward(spec, LayerOnTwoBlocks(), "shared scale, clamp");
}

TEST(ForwardTest, OneRank) {
  ExpectForward(LayerOfOneRank(), LayerOnTwoBlocks(), "one rank, two token blocks");
}

TEST(ForwardTest, ThreeRanksUnevenTokensAndExperts) {
  ExpectForward(UnevenLayer(), LayerOnTwoBlocks(), "uneven");
  LayerSpec spec = UnevenSharedLayer();
  ExpectForward(spec, LayerOnTwoBlocks(), "a rank without experts");
  spec.tokens = {0, 0, 0};
  RunForward(LayerData(spec), LayerOnTwoBlocks());
}

TEST(ForwardTest, MissingAndRepeatedRoutes) {
  DeviceLayerOptions options = LayerOnTwoBlocks();
  options.id_bytes = 4;
  ExpectForward(LayerWithRepeatedRoutes(), options, "routes 3, 3, -1, -1");
}

// Several macrobatches: slots of the ring are used again.
TEST(ForwardTest, SeveralMacrobatches) {
  for (const int64_t macrobatch : {1, 2}) {
    ExpectForward(LongLayer(), WithRing(1, macrobatch), StrCat("macrobatch of ", macrobatch));
  }
}

TEST(ForwardTest, BitsDoNotDependOnHowItRuns) {
  const LayerData data(LongLayer());
  const Tensor expected = RunForward(data, LayerOnTwoBlocks());
  const auto expect_same = [&](const DeviceLayerOptions& options, const std::string& label) {
    EXPECT_EQ(RunForward(data, options, {5, 0.1}), expected) << label;
  };
  ForEachWayToRun(expect_same);
  DeviceLayerOptions panels = LayerOnTwoBlocks();
  panels.forward.minibatch_rows = 3 * 128;
  panels.output_panel_blocks = 2;
  panels.gate_up_panel_blocks = 1;
  expect_same(panels, "panels");
}

// Where the shared expert's last tiles do TokenReduce's work, all bits stay as they are.
void ExpectSameBitsFused(const LayerSpec& spec, DeviceLayerOptions options,
                         const std::string& label) {
  options.fused_forward_reduce = 0;
  const Tensor expected = ExpectForward(spec, options, label);
  const LayerData data(spec);
  for (const int32_t width : {1, 2, 3}) {
    options.fused_forward_reduce = width;
    for (const Interleaving& interleaving : kInterleavings) {
      EXPECT_EQ(RunForward(data, options, interleaving), expected)
          << label << ", width " << width << ", seed " << interleaving.seed;
    }
  }
}

TEST(ForwardTest, FusedReductionHasTheSameBits) {
  LayerSpec spec = SmallLayer();
  spec.shared_intermediate = 24;
  for (const int topk : {1, 4, 9}) {
    spec.topk = topk;
    spec.shared_scale = topk != 4;
    ExpectSameBitsFused(spec, LayerOnTwoBlocks(), StrCat(topk, " routes"));
  }
  spec.hidden = 192;  // permuted columns; whole tiles
  spec.intermediate = 64;
  spec.shared_intermediate = 32;
  for (const int topk : {1, 3}) {
    spec.topk = topk;
    ExpectSameBitsFused(spec, LayerOnTwoBlocks(), StrCat("permuted, ", topk, " routes"));
  }
}

TEST(ForwardTest, FusedReductionOfMissingRoutesAndManyTokens) {
  LayerSpec spec = SmallLayer();
  spec.shared_intermediate = 16;
  spec.tokens = {150, 70};  // a block with all rows, one whose second warpgroup has some
  for (const int topk : {1, 6}) {
    spec.topk = topk;
    spec.route = [](int64_t token, int k) -> int64_t {
      return (token + k) % 3 == 0 || token == 7 ? -1 : (token + k) % 4;
    };
    DeviceLayerOptions options = LayerOnTwoBlocks();
    options.id_bytes = topk == 1 ? 4 : 8;
    ExpectSameBitsFused(spec, options, StrCat("missing routes, ", topk));
  }
}

TEST(ForwardTest, FusedReductionHoweverItRuns) {
  LayerSpec spec = UnevenSharedLayer();
  ExpectSameBitsFused(spec, LayerOnTwoBlocks(), "uneven ranks");
  DeviceLayerOptions options = LayerOnTwoBlocks();
  options.forward.num_sms = 3;
  options.forward.num_comm_sms = 1;
  options.forward.minibatch_rows = options.forward.macrobatch_rows = 128;
  ExpectSameBitsFused(spec, options, "an SM for exchange only");
  options = LayerOnTwoBlocks();
  options.own_devices = false;
  ExpectSameBitsFused(spec, options, "three virtual ranks");
  spec.topk = 1;
  ExpectSameBitsFused(spec, options, "three virtual ranks, one route");
}

TEST(ForwardTest, BitsDoNotDependOnEpSize) {
  const std::vector<LayerSpec> specs = OneBatchOnRanks();
  const Tensor expected = RunForward(LayerData(specs[0]), LayerOnTwoBlocks());
  for (const LayerSpec& spec : specs) {
    EXPECT_EQ(RunForward(LayerData(spec), LayerOnTwoBlocks()), expected) << spec.ep_size();
  }
}

// Ranks that share a device and run one after the other.
TEST(ForwardTest, VirtualRanks) {
  const std::vector<LayerSpec> specs = OneBatchOnEightAndTwoRanks();
  DeviceLayerOptions options = LayerOnTwoBlocks();
  options.own_devices = false;
  const Tensor out = ExpectForward(specs[0], options, "eight virtual ranks");
  EXPECT_EQ(RunForward(LayerData(specs[1]), LayerOnTwoBlocks()), out);
}

// Passes follow each other without the host: counters, tickets and flags are ready for the next.
TEST(ForwardTest, PassesFollowEachOther) {
  const LayerData data(SmallLayer());
  const Tensor expected = RunForward(data, LayerOnTwoBlocks());
  for (const Interleaving& interleaving : kInterleavings) {
    StartCase(interleaving);
    DeviceLayer layer(data, LayerOnTwoBlocks(), SmallForwardKernel);
    for (int pass = 0; pass < 3; ++pass) ASSERT_EQ(layer.LaunchAll(), OkStatus());
    RunQueued();
    EXPECT_EQ(layer.Out(), expected) << "seed " << interleaving.seed;
  }
}

// Schedule kernel and forward kernel in one stream: the host never learns how many rows there are.
TEST(ForwardTest, ScheduleOfTheDevice) {
  DeviceLayerOptions options = LayerOnTwoBlocks();
  LayerSpec spec = LongLayer();
  options.forward.macrobatch_rows = 256;
  const Tensor expected = RunForward(LayerData(spec), options);
  options.device_schedule = true;
  EXPECT_EQ(ExpectForward(spec, options, "two GPUs"), expected);
  options.own_devices = false;
  EXPECT_EQ(ExpectForward(spec, options, "two virtual ranks"), expected);
}

// Schedulers and consumers each record every compute task once.
TEST(ForwardTest, ATraceHoldsEveryTask) {
  constexpr int kConsumerWarp = 0, kSchedulerWarp = 9;
  const LayerData data(LongLayer());
  StartCase({1, 0.1});
  DeviceLayerOptions options = LayerOnTwoBlocks();
  options.trace_capacity = 512;
  DeviceLayer untraced(data, options, SmallForwardKernel);
  EXPECT_EQ(untraced.LaunchAll().message(), "trace: expected none, the kernel does not fill it");
  options.trace_capacity = 0;
  DeviceLayer plain(data, options, SmallForwardKernel);
  options.trace_capacity = 512;
  DeviceLayer layer(data, options, SmallTracedForwardKernel);
  for (DeviceLayer* each : {&plain, &layer}) {
    each->Poison();
    ASSERT_EQ(each->LaunchAll(), OkStatus());
  }
  RunQueued();
  EXPECT_EQ(layer.Out(), plain.Out());
  const TraceBuffer::Trace trace = layer.trace().Read();
  for (const int traced : {kConsumerWarp, kSchedulerWarp}) {
    std::vector<int32_t> tasks;
    for (size_t warp = traced; warp < trace.counts.size(); warp += kTraceRoles) {
      ASSERT_LE(trace.counts[warp], options.trace_capacity);
      for (uint32_t i = 0; i < trace.counts[warp]; ++i) {
        const size_t at = warp * options.trace_capacity + i;
        const DeviceTraceEvent& event = trace.events[at];
        EXPECT_LE(event.begin_ns, event.end_ns);
        if (i > 0) {
          EXPECT_LE(trace.events[at - 1].end_cycles, event.end_cycles);
        }
        const int32_t stores = static_cast<int32_t>(TracePhase::kStore);
        if (event.kind % kNumTracePhases == stores) tasks.push_back(event.task);
      }
    }
    std::sort(tasks.begin(), tasks.end());
    EXPECT_GT(tasks.size(), 10u);
    for (size_t i = 0; i < tasks.size(); ++i) {
      ASSERT_EQ(tasks[i], static_cast<int32_t>(i)) << "warp " << traced;
    }
  }
}

TEST(ForwardTest, DeadRankIsNamed) {
  const LayerData data(SmallLayer());
  for (const Interleaving& interleaving : kInterleavings) {
    StartCase(interleaving, true);
    DeviceLayer layer(data, LayerOnTwoBlocks(), SmallForwardKernel);
    ASSERT_EQ(layer.Launch(1, PassMode::kWhole), OkStatus());  // rank 0 is dead
    ASSERT_EQ(runtime::Synchronize(), OkStatus()) << "the kernel ends";
    ExpectNamesRankZero(layer.CheckRecords(), 1);
  }
}

}  // namespace
}  // namespace mok::testing
