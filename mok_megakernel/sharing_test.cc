// One workspace for several layers and several live forwards, with backward passes in any order.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "mok_core/status.h"
#include "mok_megakernel/layer_test_support.h"

namespace mok::testing {
namespace {

// Layers of one workspace share H, K and dtype, and differ in everything else.
LayerSpec LayerSpecOf(int layer) {
  LayerSpec spec;
  spec.tokens = layer == 1 ? std::vector<int64_t>{7, 150} : std::vector<int64_t>{150, 40};
  spec.experts = layer == 2 ? std::vector<int32_t>{5, 4} : std::vector<int32_t>{2, 3};
  spec.topk = 2;
  spec.hidden = 40;
  spec.intermediate = 24 + 136 * layer;
  spec.shared_intermediate = layer == 1 ? 0 : 56;
  spec.swiglu_limit = layer == 2 ? 0.5f : 0;
  spec.seed = 10 + static_cast<uint32_t>(layer);
  return spec;
}

RunOptions OptionsOf(int layer) {
  RunOptions options;
  options.threads = 1 + layer;
  options.comm_threads = layer == 1 ? 1 : 0;
  options.macrobatch_rows = layer == 2 ? 128 : 0;
  return options;
}

class SharingTest : public ::testing::TestWithParam<std::vector<int>> {};

TEST_P(SharingTest, BackwardInThisOrder) {
  constexpr int kLayers = 3;
  std::vector<std::unique_ptr<LayerData>> data;
  for (int layer = 0; layer < kLayers; ++layer) {
    data.push_back(std::make_unique<LayerData>(LayerSpecOf(layer)));
  }
  LayerSpec largest = LayerSpecOf(0);
  largest.tokens = {150, 150};
  const RankWorkspaces workspaces(largest);
  // live[rank][layer]; two live forwards of each layer.
  std::vector<std::vector<std::unique_ptr<RankLayer>>> live(2);
  for (int rank = 0; rank < 2; ++rank) {
    for (int forward = 0; forward < 2 * kLayers; ++forward) {
      const int layer = forward % kLayers;
      live[static_cast<size_t>(rank)].push_back(
          std::make_unique<RankLayer>(*data[static_cast<size_t>(layer)], rank, OptionsOf(layer)));
    }
  }
  RunRanks(2, [&](int rank) {
    for (const auto& layer : live[static_cast<size_t>(rank)]) {
      ASSERT_EQ(layer->BuildSchedule(workspaces[rank]), MOK_OK) << mok_last_error();
      ASSERT_EQ(layer->Forward(workspaces[rank]), MOK_OK) << mok_last_error();
      ASSERT_EQ(mok_workspace_poison(workspaces[rank]), MOK_OK);
    }
    for (const int forward : GetParam()) {
      RankLayer& layer = *live[static_cast<size_t>(rank)][static_cast<size_t>(forward)];
      ASSERT_EQ(layer.Backward(workspaces[rank]), MOK_OK) << mok_last_error();
    }
  });
  for (int forward = 0; forward < 2 * kLayers; ++forward) {
    const int layer = forward % kLayers;
    const LayerResult alone = RunLayer(*data[static_cast<size_t>(layer)], OptionsOf(layer));
    Tensor out, d_x, d_gate, d_down;
    for (int rank = 0; rank < 2; ++rank) {
      const RankLayer& part = *live[static_cast<size_t>(rank)][static_cast<size_t>(forward)];
      out.Append(part.out);
      d_x.Append(part.d_x);
      d_gate.Append(part.d_gate);
      d_down.Append(part.d_down);
    }
    const std::string label = StrCat("forward ", forward);
    EXPECT_TRUE(out == alone.out) << label;
    EXPECT_TRUE(d_x == alone.d_x) << label;
    EXPECT_TRUE(d_gate == alone.d_gate) << label;
    EXPECT_TRUE(d_down == alone.d_down) << label;
  }
}

INSTANTIATE_TEST_SUITE_P(Orders, SharingTest,
                         ::testing::Values(std::vector<int>{0, 1, 2, 3, 4, 5},
                                           std::vector<int>{5, 4, 3, 2, 1, 0},
                                           std::vector<int>{2, 0, 4, 1, 5, 3}));

// The same ring may serve two backwards when nothing was recomputed into it.
TEST(RepeatedBackwardTest, SameBits) {
  const LayerData data(LayerSpecOf(0));
  const RankWorkspaces workspaces(data.spec);
  std::vector<std::unique_ptr<RankLayer>> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.push_back(std::make_unique<RankLayer>(data, rank, OptionsOf(0)));
  }
  std::vector<Tensor> first(2);
  RunRanks(2, [&](int rank) {
    RankLayer& layer = *ranks[static_cast<size_t>(rank)];
    ASSERT_EQ(layer.BuildSchedule(workspaces[rank]), MOK_OK);
    ASSERT_EQ(layer.Forward(workspaces[rank]), MOK_OK);
    ASSERT_EQ(layer.Backward(workspaces[rank]), MOK_OK);
    first[static_cast<size_t>(rank)] = layer.d_gate;
    ASSERT_EQ(layer.Backward(workspaces[rank]), MOK_OK);
    EXPECT_TRUE(layer.d_gate == first[static_cast<size_t>(rank)]);
  });
}

}  // namespace
}  // namespace mok::testing
