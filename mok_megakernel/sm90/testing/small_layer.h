// Test only: layers of the tests of both passes, and how they run in the emulator.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "mok_core/emulator/emulator.h"
#include "mok_core/status.h"
#include "mok_megakernel/layer_test_support.h"
#include "mok_megakernel/sm90/testing/device_layer.h"

namespace mok::testing {

// Several macrobatches, experts that cross them, slots of the ring that are used again.
inline LayerSpec LongLayer() {
  LayerSpec spec;
  spec.tokens = {70, 90};
  spec.experts = {2, 3};
  spec.topk = 3;
  spec.hidden = 40;
  spec.intermediate = 24;
  return spec;
}

// One rank with two token blocks.
inline LayerSpec LayerOfOneRank() {
  LayerSpec spec = SmallLayer();
  spec.tokens = {150};
  spec.experts = {3};
  spec.shared_intermediate = 8;
  return spec;
}

// Three ranks and seven experts; a rank without tokens.
inline LayerSpec UnevenLayer() {
  LayerSpec spec = SmallLayer();
  spec.tokens = {0, 5, 17};
  spec.experts = {3, 2, 2};
  spec.topk = 3;
  return spec;
}
// The same with a shared expert and a rank without experts.
inline LayerSpec UnevenSharedLayer() {
  LayerSpec spec = UnevenLayer();
  spec.shared_intermediate = 8;
  spec.experts = {4, 0, 1};
  return spec;
}

// Routes 3, 3, -1, -1 of a token, none of one token; a weight of zero.
inline LayerSpec LayerWithRepeatedRoutes() {
  LayerSpec spec = SmallLayer();
  spec.topk = 4;
  spec.route = [](int64_t token, int k) -> int64_t {
    constexpr int64_t kIds[] = {3, 3, -1, -1};
    return token == 7 ? -1 : kIds[k];
  };
  spec.weight = [](int64_t, int k) { return k == 1 ? 0.0f : 0.75f; };
  return spec;
}

// One batch on one, two and three ranks, which all give the same bits.
inline std::vector<LayerSpec> OneBatchOnRanks() {
  LayerSpec one = SmallLayer();
  one.shared_intermediate = 16;
  one.tokens = {36};
  one.experts = {6};
  LayerSpec two = one, three = one;
  two.tokens = {16, 20};
  two.experts = {3, 3};
  three.tokens = {30, 0, 6};
  three.experts = {1, 3, 2};
  return {one, two, three};
}
// Another one on eight ranks and on two.
inline std::vector<LayerSpec> OneBatchOnEightAndTwoRanks() {
  LayerSpec eight = UnevenSharedLayer();
  eight.tokens = {9, 0, 4, 7, 3, 1, 8, 4};
  eight.experts = {1, 1, 1, 1, 1, 1, 1, 1};
  LayerSpec two = eight;
  two.tokens = {20, 16};
  two.experts = {4, 4};
  return {eight, two};
}

inline DeviceLayerOptions LayerOnTwoBlocks() {
  DeviceLayerOptions options;
  options.forward.num_sms = 2;
  options.exchange_tiles = 4;
  options.token_reduce_tiles = 8;
  return options;
}

inline DeviceLayerOptions WithRing(int64_t minibatch_blocks, int64_t macrobatch_blocks) {
  DeviceLayerOptions options = LayerOnTwoBlocks();
  options.forward.minibatch_rows = minibatch_blocks * 128;
  options.forward.macrobatch_rows = macrobatch_blocks * 128;
  return options;
}

// Ways to run a pass that change no bit of it.
inline void ForEachWayToRun(
    const std::function<void(const DeviceLayerOptions& options, const std::string& label)>& run) {
  for (const int32_t num_sms : {1, 3, 5}) {
    DeviceLayerOptions options = LayerOnTwoBlocks();
    options.forward.num_sms = num_sms;
    run(options, StrCat(num_sms, " SMs"));
  }
  for (const int32_t num_comm_sms : {1, 2}) {
    DeviceLayerOptions options = LayerOnTwoBlocks();
    options.forward.num_sms = 3;
    options.forward.num_comm_sms = num_comm_sms;
    run(options, StrCat(num_comm_sms, " SMs for exchange only"));
  }
  for (const int64_t minibatch : {1, 2, 3}) {
    for (const int64_t macrobatch : {1, 2, 3, 8}) {
      run(WithRing(minibatch, macrobatch),
          StrCat("minibatch ", minibatch, ", macrobatch ", macrobatch));
    }
  }
  DeviceLayerOptions exchange = LayerOnTwoBlocks();
  exchange.exchange_tiles = 1;
  exchange.token_reduce_tiles = 1;
  exchange.chunk_bytes = 32;
  exchange.push_interval_ns = 300;
  exchange.push_interval_beside_pulls_ns = 700;
  run(exchange, "long exchange tiles, short chunks, paced");
}

inline void RunQueued() {
  const emulator::Report report = emulator::Run();
  EXPECT_TRUE(report.ok) << report.kind << ": " << report.text;
}

// That of rank 1, which has waited for rank 0 at the entry of a pass.
inline void ExpectNamesRankZero(const Status& status, int pass) {
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
  EXPECT_NE(status.message().find("rank 1 waited"), std::string::npos) << status;
  const std::string text = StrCat("for rank 0 at the entry of pass ", pass);
  EXPECT_NE(status.message().find(text), std::string::npos) << status;
}

}  // namespace mok::testing
