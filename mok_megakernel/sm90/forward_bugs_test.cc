// Every planted mistake of the forward kernel and of its exchange is noticed under every
// interleaving.
#include <gtest/gtest.h>

#include <string>

#include "mok_core/device/runtime.h"
#include "mok_core/emulator/emulator.h"
#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_megakernel/sm90/forward_test_kernels.h"
#include "mok_megakernel/sm90/testing/device_layer.h"

namespace mok::testing {
namespace {

// Two ranks whose rings are used several times, a shared expert, and a last token block that is not
// full.
LayerSpec SmallLayer() {
  LayerSpec spec;
  spec.tokens = {40, 90};  // the second warpgroup has rows as well
  spec.experts = {2, 3};
  spec.topk = 2;
  spec.hidden = 40;
  spec.intermediate = 24;
  spec.shared_intermediate = 8;
  return spec;
}

DeviceLayerOptions OptionsOf() {
  DeviceLayerOptions options;
  options.forward.num_sms = 2;
  options.forward.minibatch_rows = 128;
  options.forward.macrobatch_rows = 128;
  options.exchange_tiles = 8;
  options.token_reduce_tiles = 8;
  options.chunk_bytes = 32;  // a row is three chunks, the last one short
  return options;
}

// Two passes: what the first leaves behind matters. expected: out of the correct kernel.
Outcome RunKernel(const LayerData& data, const ForwardKernelInfo& kernel,
                  const Interleaving& interleaving, const Tensor& expected) {
  StartCase(interleaving);
  DeviceLayer layer(data, OptionsOf(), SmallForwardKernel);
  for (int pass = 0; pass < 2; ++pass) MOK_CHECK(layer.LaunchAll(kernel).ok());
  return RunAndCompare([&] { return layer.CheckRecords().ok() && layer.Out() == expected; });
}

class ForwardBugsTest : public ::testing::Test {
 protected:
  ForwardBugsTest() : data_(SmallLayer()) {
    StartCase({0, 0.1});
    DeviceLayer layer(data_, OptionsOf(), SmallForwardKernel);
    MOK_CHECK(layer.LaunchAll().ok());
    MOK_CHECK(runtime::Synchronize().ok());
    expected_ = layer.Out();
    const ReferenceResult reference = RunReference(ReferenceInputsOf(data_));
    MOK_CHECK(RelativeError(expected_, reference.out) < 4e-3);
  }

  LayerData data_;
  Tensor expected_;
};

TEST_F(ForwardBugsTest, EveryBugOfTheKernelIsFlagged) {
  ExpectEveryBugFlagged(
      [&](int bug, const Interleaving& interleaving) {
        return RunKernel(data_, ForwardKernelWithBug(bug), interleaving, expected_);
      },
      static_cast<int>(PassBug::kCount),
      [](int bug) { return bug == static_cast<int>(PassBug::kNoEndOfWorkOnAbort); });
}

TEST_F(ForwardBugsTest, ABlockThatDoesNotDrainAfterAnAbortIsFlagged) {
  for (const PassBug bug : {PassBug::kNone, PassBug::kNoEndOfWorkOnAbort}) {
    for (const Interleaving& interleaving : kInterleavings) {
      StartCase(interleaving);
      emulator::Options options = emulator::CurrentOptions();
      options.fast_forward = true;
      emulator::Configure(options);
      DeviceLayer layer(data_, OptionsOf(), [](ColumnOrder) { return ForwardKernelWithBug(0); });
      // Rank 1 is dead.
      MOK_CHECK(
          layer.Launch(0, PassMode::kWhole, ForwardKernelWithBug(static_cast<int>(bug))).ok());
      const emulator::Report report = emulator::Run();
      EXPECT_EQ(report.ok, bug == PassBug::kNone) << report.kind << report.text;
    }
  }
}

TEST_F(ForwardBugsTest, EveryBugOfTheExchangeIsFlagged) {
  ExpectEveryBugFlagged(
      [&](int bug, const Interleaving& interleaving) {
        return RunKernel(data_, ForwardKernelWithExchangeBug(bug), interleaving, expected_);
      },
      static_cast<int>(ExchangeBug::kCount),
      // Whoever stored y has executed the fence as well; the lanes that move chunks go in step, and
      // only scalars, which the forward has not, need more.
      [](int bug) {
        return bug == static_cast<int>(ExchangeBug::kNoFenceAfterWait) ||
               bug == static_cast<int>(ExchangeBug::kSignalWithoutSync);
      });
}

}  // namespace
}  // namespace mok::testing
