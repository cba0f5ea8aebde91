// The memory of a backward in the emulator: what it reads and overwrites, and how much there is.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "mok_core/bits.h"
#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_megakernel/sm90/backward_test_kernels.h"
#include "mok_megakernel/sm90/forward_test_kernels.h"
#include "mok_megakernel/sm90/testing/backward_cases.h"
#include "mok_megakernel/sm90/testing/device_backward.h"
#include "mok_megakernel/sm90/testing/device_layer.h"
#include "mok_schedule/task_program.h"

namespace mok::testing {
namespace {

// What the pass does not write, it does not read.
TEST(BackwardMemoryTest, PoisonedMemory) {
  LayerSpec spec = LongLayer();
  spec.shared_intermediate = 16;
  spec.shared_scale = true;
  const LayerData data(spec);
  for (const int64_t macrobatch : {128, 1024}) {
    for (const int kept : {0, 1}) {
      BackwardCase options = TwoBlocks();
      options.layer.forward.macrobatch_rows = macrobatch;
      options.backward.kept_macrobatches = kept;
      options.backward.own_state = kept == 0;
      const LayerResult result = RunBackward(data, options, {4, 0.1}, true);
      ExpectMatchesReference(data, result);
      ExpectSameBits(RunBackward(data, TwoBlocks()), result, StrCat(macrobatch, ", ", kept));
    }
  }
}

// Steps follow each other without the host: counters, tickets and flags are ready for the next
// pass, whichever it is.
TEST(BackwardMemoryTest, PassesFollowEachOther) {
  const LayerData data(SmallLayer());
  const LayerResult expected = RunBackward(data, TwoBlocks());
  for (const Interleaving& interleaving : kInterleavings) {
    StartCase(interleaving);
    DeviceLayer layer(data, TwoBlocks().layer, SmallForwardKernel);
    DeviceBackward backward(layer, {.keeps_context = true}, SmallBackwardKernel);
    for (int step = 0; step < 2; ++step) {
      ASSERT_EQ(layer.LaunchAll(), OkStatus());
      ASSERT_EQ(backward.LaunchAll(), OkStatus());
      ASSERT_EQ(backward.LaunchAll(), OkStatus());
    }
    RunQueued();
    ExpectSameBits(expected, backward.Result(), StrCat("seed ", interleaving.seed));
  }
}

// The first backward overwrites the context, from which another one computes everything again.
TEST(BackwardMemoryTest, ABackwardAfterAnother) {
  LayerSpec spec = LongLayer();
  spec.shared_intermediate = 16;
  const LayerData data(spec);
  const LayerResult expected = RunBackward(data, TwoBlocks());
  for (const Interleaving& interleaving : kInterleavings) {
    StartCase(interleaving);
    DeviceLayer layer(data, TwoBlocks().layer, SmallForwardKernel);
    DeviceBackward first(layer, {.own_state = true}, SmallBackwardKernel);
    DeviceBackward second(layer, {.kept_macrobatches = 0, .own_state = true}, SmallBackwardKernel);
    ASSERT_EQ(layer.LaunchAll(), OkStatus());
    ASSERT_EQ(first.LaunchAll(), OkStatus());
    ASSERT_EQ(second.LaunchAll(), OkStatus());
    RunQueued();
    ExpectSameBits(expected, first.Result(), StrCat("first, seed ", interleaving.seed));
    ExpectSameBits(expected, second.Result(), StrCat("second, seed ", interleaving.seed));
  }
}

// A batch that fills the ring, with a shared expert, uses exactly the counters that there are.
TEST(BackwardMemoryTest, CountersAreThoseOfTheProgram) {
  for (const int64_t macrobatch : {1, 7, 166}) {
    for (const int64_t tokens : {1, 128, 2000}) {
      for (const int32_t experts : {0, 1, 48}) {
        ProgramShape program;
        program.ring = {macrobatch + 1, 1, macrobatch};
        program.token_blocks = CeilDiv<int64_t>(tokens, kRowBlock);
        program.shared_intermediate_tiles = 1;
        RoutingTableView table = {};
        table.num_local_experts = experts;
        int64_t most = 0;
        for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
          program.pass = pass;
          const ProgramView view(ProgramView::Uncounted(), program, table, {});
          most = std::max<int64_t>(most, view.NumCounters());
        }
        ForwardLayerShape shape;
        shape.max_tokens = tokens;
        shape.num_local_experts = experts;
        ForwardConfig config;
        config.macrobatch_blocks = macrobatch;
        EXPECT_EQ(PassMemoryLayout(shape, config).num_counters(), most)
            << macrobatch << " slots, " << tokens << " tokens, " << experts << " experts";
      }
    }
  }
}

// What benchmarks/README.md states, so that it does not grow unnoticed: rows of d_out and w * h in
// the ring, d_x in its window, fp32 sums of one expert, and the shared expert's rows.
TEST(BackwardMemoryTest, ScratchBytes) {
  constexpr int64_t kH = 7168, kI = 2048, kIs = 1024, kT = 2048;
  ForwardLayerShape shape = {kT, kH, kI, kIs, 8, 12, 6, 2};
  const PassKernelInfo kernel = SmallBackwardKernel(ColumnOrder::kPermuted);
  for (const int64_t ring : {21248, 40960}) {  // 12 minibatches of 33 row blocks hold any routing
    const ForwardConfig config = SelectForwardConfig(shape, {}, {.macrobatch_rows = ring}).value();
    const BackwardScratchLayout layout(shape, config, kernel);
    const bool carries = ring == 21248;
    const int64_t rows = ring * (2 * kH + 2 * kI), window = 50 * kRowBlock * 2 * kH;
    const int64_t scalars = 4 * (ring * (1 + kI / 256) + (kT + 1) * (kIs / 256));
    const int64_t carry = carries ? 3 * 4 * kH * kI : 0;
    const int64_t shared = (kT + 1) * 2 * kIs;
    const auto bytes = static_cast<int64_t>(layout.bytes() - layout.state_bytes());
    EXPECT_GE(bytes, rows + window + scalars + carry + shared);
    EXPECT_LT(bytes, rows + window + scalars + carry + shared + 16 * 256) << "alignment only";
    alignas(256) static std::byte base[1];
    EXPECT_EQ(layout.At(base).carry_gate != nullptr, carries);
    EXPECT_EQ(layout.At(base).carry_down != nullptr, carries);
  }
}

// A rank alone sends no row: y and the window of d_x have no memory.
TEST(BackwardMemoryTest, ARankAloneHasNoRowsToSend) {
  constexpr int64_t kH = 512, kRing = 1024;
  ForwardLayerShape shape = {300, kH, 256, 128, 2, 4, 4, 1};
  const PassKernelInfo kernel = SmallBackwardKernel(ColumnOrder::kPermuted);
  const ForwardConfig config = SelectForwardConfig(shape, {}, {.macrobatch_rows = kRing}).value();
  const auto forward_bytes = [&] { return ForwardScratchLayout(shape, config).bytes(); };
  const auto backward_bytes = [&] { return BackwardScratchLayout(shape, config, kernel).bytes(); };
  const size_t forward = forward_bytes(), backward = backward_bytes();
  shape.ep_size = 2;
  EXPECT_EQ(forward_bytes() - forward, size_t{kRing * kH * 2});
  EXPECT_EQ(backward_bytes() - backward, static_cast<size_t>(config.d_x_rows() * kH * 2));
}

}  // namespace
}  // namespace mok::testing
