// Every planted mistake of the backward kernel is noticed under every interleaving.
#include <gtest/gtest.h>

#include <string>

#include "mok_core/device/runtime.h"
#include "mok_core/emulator/emulator.h"
#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_megakernel/sm90/backward_test_kernels.h"
#include "mok_megakernel/sm90/forward_test_kernels.h"
#include "mok_megakernel/sm90/testing/bug_layer.h"
#include "mok_megakernel/sm90/testing/device_backward.h"
#include "mok_megakernel/sm90/testing/device_layer.h"

namespace mok::testing {
namespace {

DeviceLayerOptions OptionsFor(PassBug bug) {
  DeviceLayerOptions options = BugOptions();
  // So many blocks that the one with InputGrad has none of the weight gradients after it.
  if (bug == PassBug::kGateUpOverwrite) options.forward.num_sms = 8;
  // Slots of the window are used again before those of the ring are, which have more waits.
  if (bug != PassBug::kWindowOverwrite) return options;
  options.forward.macrobatch_rows = 3 * options.forward.minibatch_rows;
  options.d_x_window_blocks = 1;
  return options;
}

// The layer after its forward, and a backward whose counters and meetings are its own. It computes
// everything again: a second pass does not find what the forward has left.
struct Case {
  explicit Case(const LayerData& data, PassBug bug = PassBug::kNone)
      : Case(data, OptionsFor(bug)) {}
  Case(const LayerData& data, const DeviceLayerOptions& options)
      : layer(data, options, SmallForwardKernel),
        backward(layer, {.kept_macrobatches = 0, .own_state = true}, SmallBackwardKernel) {
    MOK_CHECK(layer.LaunchAll().ok());
    MOK_CHECK(runtime::Synchronize().ok());
  }

  DeviceLayer layer;
  DeviceBackward backward;
};

bool SameGradients(const LayerResult& a, const LayerResult& b) {
  return a.d_x == b.d_x && a.d_topk_weight == b.d_topk_weight && a.d_gate == b.d_gate &&
         a.d_up == b.d_up && a.d_down == b.d_down && a.d_shared_gate == b.d_shared_gate &&
         a.d_shared_up == b.d_shared_up && a.d_shared_down == b.d_shared_down;
}

class BackwardBugsTest : public ::testing::Test {
 protected:
  BackwardBugsTest() : data_(BugLayer()) {
    StartCase({0, 0.1});
    Case correct(data_);
    MOK_CHECK(correct.backward.LaunchAll().ok());
    MOK_CHECK(runtime::Synchronize().ok());
    expected_ = correct.backward.Result();
  }

  // Two passes: what the first leaves behind matters.
  Outcome RunKernel(int bug, const Interleaving& interleaving) {
    StartCase(interleaving);
    Case test(data_, static_cast<PassBug>(bug));
    for (int pass = 0; pass < 2; ++pass) {
      MOK_CHECK(test.backward.LaunchAll(BackwardKernelWithBug(bug)).ok());
    }
    return RunAndCompare([&] {
      return test.backward.CheckRecords().ok() && SameGradients(test.backward.Result(), expected_);
    });
  }

  LayerData data_;
  LayerResult expected_;
};

TEST_F(BackwardBugsTest, TheCorrectKernelIsCorrect) {
  ExpectMatchesReference(data_, expected_);
  StartCase({0, 0.1});
  Case windowed(data_, PassBug::kWindowOverwrite);
  ASSERT_TRUE(windowed.backward.LaunchAll().ok() && runtime::Synchronize().ok());
  EXPECT_TRUE(SameGradients(windowed.backward.Result(), expected_));
}

TEST_F(BackwardBugsTest, EveryBugOfTheKernelIsFlagged) {
  ExpectEveryBugFlagged(
      [&](int bug, const Interleaving& interleaving) { return RunKernel(bug, interleaving); },
      static_cast<int>(PassBug::kCount),
      [](int bug) {
        return IsOfALostSchedule(bug) || bug == static_cast<int>(PassBug::kNoEndOfWorkOnAbort) ||
               bug == static_cast<int>(PassBug::kRoutesDescending);  // of a fused reduction
      });
}

// Of the forward's tests, which look at all bugs: the epilogue is the same.
TEST_F(BackwardBugsTest, AFusedReductionThatDoesNotWaitIsFlagged) {
  DeviceLayerOptions options = BugOptions();
  options.fused_backward_reduce = 1;
  for (const PassBug bug : {PassBug::kNone, PassBug::kReduceBeforeExit}) {
    for (const Interleaving& interleaving : kInterleavings) {
      StartCase(interleaving);
      Case test(data_, options);
      const PassKernelInfo kernel = BackwardKernelWithBug(static_cast<int>(bug));
      for (int pass = 0; pass < 2; ++pass) MOK_CHECK(test.backward.LaunchAll(kernel).ok());
      const Outcome outcome =
          RunAndCompare([&] { return SameGradients(test.backward.Result(), expected_); });
      EXPECT_EQ(outcome.kind == "ok", bug == PassBug::kNone) << outcome.kind << outcome.text;
    }
  }
}

TEST_F(BackwardBugsTest, ABlockThatDoesNotDrainAfterAnAbortIsFlagged) {
  for (const PassBug bug : {PassBug::kNone, PassBug::kNoEndOfWorkOnAbort}) {
    for (const Interleaving& interleaving : kInterleavings) {
      StartCase(interleaving, true);
      Case test(data_);
      // Rank 1 is dead.
      MOK_CHECK(
          test.backward.Launch(0, PassMode::kWhole, BackwardKernelWithBug(static_cast<int>(bug)))
              .ok());
      const emulator::Report report = emulator::Run();
      EXPECT_EQ(report.ok, bug == PassBug::kNone) << report.kind << report.text;
    }
  }
}

}  // namespace
}  // namespace mok::testing
