// Every planted mistake of the forward kernel and of its exchange is noticed under every
// interleaving.
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "mok_core/device/runtime.h"
#include "mok_core/emulator/emulator.h"
#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_megakernel/sm90/forward_test_kernels.h"
#include "mok_megakernel/sm90/testing/bug_layer.h"
#include "mok_megakernel/sm90/testing/device_layer.h"

namespace mok::testing {
namespace {

DeviceLayerOptions FusedOptions() {
  DeviceLayerOptions options = BugOptions();
  options.fused_forward_reduce = 1;
  return options;
}

// Two passes: what the first leaves behind matters. expected: out of the correct kernel.
Outcome RunKernel(const LayerData& data, const ForwardKernelInfo& kernel,
                  const Interleaving& interleaving, const Tensor& expected,
                  const DeviceLayerOptions& options = BugOptions()) {
  StartCase(interleaving);
  DeviceLayer layer(data, options, SmallForwardKernel);
  for (int pass = 0; pass < 2; ++pass) MOK_CHECK(layer.LaunchAll(kernel).ok());
  return RunAndCompare([&] { return layer.CheckRecords().ok() && layer.Out() == expected; });
}

class ForwardBugsTest : public ::testing::Test {
 protected:
  ForwardBugsTest() : data_(BugLayer()) {
    StartCase({0, 0.1});
    DeviceLayer layer(data_, BugOptions(), SmallForwardKernel);
    MOK_CHECK(layer.LaunchAll().ok());
    MOK_CHECK(runtime::Synchronize().ok());
    expected_ = layer.Out();
    const ReferenceResult reference = RunReference(ReferenceInputsOf(data_));
    MOK_CHECK(RelativeError(expected_, reference.out) < 4e-3);
  }

  LayerData data_;
  Tensor expected_;
};

// Mistakes of the backward, and those that tests of their own look at.
bool HasNoEffect(int bug) {
  return IsOfALostSchedule(bug) || bug == static_cast<int>(PassBug::kNoEndOfWorkOnAbort) ||
         bug == static_cast<int>(PassBug::kCopiesOverwritten) ||
         bug == static_cast<int>(PassBug::kWindowOverwrite) ||
         bug == static_cast<int>(PassBug::kGateUpOverwrite) ||
         bug == static_cast<int>(PassBug::kRoutesDescending);
}

TEST_F(ForwardBugsTest, EveryBugOfTheKernelIsFlagged) {
  ExpectEveryBugFlagged(
      [&](int bug, const Interleaving& interleaving) {
        return RunKernel(data_, ForwardKernelWithBug(bug), interleaving, expected_);
      },
      static_cast<int>(PassBug::kCount), HasNoEffect);
}

// What the other test does not run: TokenReduce's work in the shared expert's last tiles.
TEST_F(ForwardBugsTest, EveryBugOfAFusedReductionIsFlagged) {
  ExpectEveryBugFlagged(
      [&](int bug, const Interleaving& interleaving) {
        return RunKernel(data_, ForwardKernelWithBug(bug), interleaving, expected_, FusedOptions());
      },
      static_cast<int>(PassBug::kCount), HasNoEffect);
}

// A rank alone sends no row. That Combine waits for Down, and the exit for Combine, is then all
// that keeps the sums behind the rows, if they need not wait for a shared expert either.
TEST(ForwardOwnRowsTest, SumsThatDoNotWaitForDownAreFlagged) {
  LayerSpec spec = LayerOfOneRank();
  spec.shared_intermediate = 0;
  const LayerData data(spec);
  Tensor expected;
  for (const PassBug bug : {PassBug::kNone, PassBug::kPushTooEarly}) {
    for (const Interleaving& interleaving : kInterleavings) {
      StartCase(interleaving);
      DeviceLayer layer(data, BugOptions(), SmallForwardKernel);
      MOK_CHECK(layer.LaunchAll(ForwardKernelWithBug(static_cast<int>(bug))).ok());
      const Outcome outcome = RunAndCompare([&] {
        if (expected.bytes.empty()) expected = layer.Out();
        return layer.CheckRecords().ok() && layer.Out() == expected;
      });
      EXPECT_EQ(outcome.kind == "ok", bug == PassBug::kNone) << outcome.kind << outcome.text;
    }
  }
}

// Two large routes cancel each other: what has been added before them loses its last digits.
TEST(ForwardRouteOrderTest, RoutesInTheWrongOrderAreFlagged) {
  LayerSpec spec = BugLayer();
  spec.topk = 3;
  spec.route = [](int64_t token, int k) -> int64_t { return k < 2 ? token % 5 : (token + 1) % 5; };
  spec.weight = [](int64_t, int k) { return k == 0 ? 0x1p20f : k == 1 ? -0x1p20f : 1.0f; };
  const LayerData data(spec);
  Tensor expected;
  {
    StartCase({0, 0.1});
    DeviceLayer layer(data, BugOptions(), SmallForwardKernel);
    MOK_CHECK(layer.LaunchAll().ok() && runtime::Synchronize().ok());
    expected = layer.Out();
  }
  for (const PassBug bug : {PassBug::kNone, PassBug::kRoutesDescending}) {
    for (const Interleaving& interleaving : kInterleavings) {
      const ForwardKernelInfo kernel = ForwardKernelWithBug(static_cast<int>(bug));
      const Outcome outcome = RunKernel(data, kernel, interleaving, expected, FusedOptions());
      EXPECT_EQ(outcome.kind, bug == PassBug::kNone ? "ok" : "mismatch") << outcome.text;
    }
  }
}

TEST_F(ForwardBugsTest, ABlockThatDoesNotDrainAfterAnAbortIsFlagged) {
  for (const PassBug bug : {PassBug::kNone, PassBug::kNoEndOfWorkOnAbort}) {
    for (const Interleaving& interleaving : kInterleavings) {
      StartCase(interleaving, true);
      DeviceLayer layer(data_, BugOptions(), [](ColumnOrder) { return ForwardKernelWithBug(0); });
      // Rank 1 is dead.
      MOK_CHECK(
          layer.Launch(0, PassMode::kWhole, ForwardKernelWithBug(static_cast<int>(bug))).ok());
      const emulator::Report report = emulator::Run();
      EXPECT_EQ(report.ok, bug == PassBug::kNone) << report.kind << report.text;
    }
  }
}

// Rank 0 runs a pass of a schedule from before an error; rank 1 does not, and its memory is its
// own.
Outcome RunLostSchedule(const LayerData& data, PassBug bug, const Interleaving& interleaving) {
  StartCase(interleaving, true);
  DeviceLayer layer(data, BugOptions(), SmallForwardKernel);
  PassState* state = layer.rank(0).arguments.scratch.state;
  PassState heard = {};
  heard.refusals.generation = 2;
  MOK_CHECK(runtime::CopyToDevice(state, &heard, sizeof heard).ok());
  layer.Poison();  // with what `bytes` holds
  BFloat16* routes = layer.rank(1).arguments.peers.routes_of_rank[1];
  const LayerSpec& spec = data.spec;
  std::vector<std::byte> bytes(
      static_cast<size_t>(spec.tokens[1] * spec.topk * spec.hidden) * sizeof(BFloat16),
      std::byte{0xFF});
  const ForwardKernelInfo kernel = ForwardKernelWithBug(static_cast<int>(bug));
  MOK_CHECK(layer.Launch(0, PassMode::kWhole, kernel).ok());
  return RunAndCompare([&] {
    PassState after = {};
    std::vector<std::byte> left(bytes.size());
    MOK_CHECK(runtime::CopyToHost(&after, state, sizeof after).ok());
    MOK_CHECK(runtime::CopyToHost(left.data(), routes, left.size()).ok());
    return layer.CheckRecords().ok() && left == bytes && after.epoch == 0 &&
           after.refusals.late_passes == 1;
  });
}

TEST_F(ForwardBugsTest, APassOfALostScheduleThatDoesAnythingIsFlagged) {
  for (int bug = 0; bug < static_cast<int>(PassBug::kCount); ++bug) {
    if (bug != 0 && !IsOfALostSchedule(bug)) continue;
    for (const Interleaving& interleaving : kInterleavings) {
      const Outcome outcome = RunLostSchedule(data_, static_cast<PassBug>(bug), interleaving);
      EXPECT_EQ(outcome.kind == "ok", bug == 0) << bug << ": " << outcome.kind << outcome.text;
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
      // only scalars, which the forward has not, need more; tiles are the program's, not the
      // exchange's; a ring that is used several times is not copied from; pushes that stay slow are
      // only slow.
      [](int bug) {
        return bug == static_cast<int>(ExchangeBug::kNoFenceAfterWait) ||
               bug == static_cast<int>(ExchangeBug::kSignalWithoutSync) ||
               bug == static_cast<int>(ExchangeBug::kMovesPadding) ||
               bug == static_cast<int>(ExchangeBug::kCopiesTooEarly) ||
               bug == static_cast<int>(ExchangeBug::kNoFenceBeforeCopy) ||
               bug == static_cast<int>(ExchangeBug::kStaysPulling);
      });
}

}  // namespace
}  // namespace mok::testing
