#include "mok_megakernel/sm90/forward_config.h"

#include <gtest/gtest.h>

#include <string>

namespace mok {
namespace {

// kimi-k2.7 on two GPUs with the local experts of EP 64.
ForwardLayerShape Kimi() {
  ForwardLayerShape shape;
  shape.max_tokens = 2048;
  shape.hidden = 7168;
  shape.intermediate = 2048;
  shape.shared_intermediate = 2048;
  shape.topk = 8;
  shape.num_experts = 12;
  shape.num_local_experts = 6;
  shape.ep_size = 2;
  return shape;
}

ForwardLayerShape Qwen() {
  ForwardLayerShape shape = Kimi();
  shape.hidden = 4096;
  shape.intermediate = shape.shared_intermediate = 1024;
  shape.topk = 10;
  shape.num_experts = 16;
  shape.num_local_experts = 8;
  return shape;
}

TEST(ForwardConfigTest, ModelShapes) {
  const struct {
    ForwardLayerShape shape;
    ForwardOptions options;
    const char* expected;
  } kCases[] = {
      {Kimi(),
       {},
       "permuted columns, 132 blocks, 0 for exchange only; row blocks: minibatch 33, macrobatch "
       "198, output panel 11, gate-up panel 17, d_x window 50; per block 8 exchange and 16 "
       "reduction tiles; chunk 7168 bytes (7168 dedicated), push interval 2782 ns, beside pulls "
       "22256 ns"},
      {Qwen(),
       {},
       "permuted columns, 132 blocks, 0 for exchange only; row blocks: minibatch 33, macrobatch "
       "231, output panel 11, gate-up panel 17, d_x window 50; per block 8 exchange and 16 "
       "reduction tiles; chunk 8192 bytes (8192 dedicated), push interval 3180 ns, beside pulls "
       "25440 ns"},
      {Kimi(),
       {.num_comm_sms = 12, .minibatch_rows = 2048, .macrobatch_rows = 4096},
       "permuted columns, 132 blocks, 12 for exchange only; row blocks: minibatch 16, macrobatch "
       "32, output panel 10, gate-up panel 15, d_x window 24; per block 8 exchange and 16 "
       "reduction tiles; chunk 7168 bytes (7168 dedicated), push interval 1517 ns, beside pulls "
       "12136 ns"},
  };
  for (const auto& expected : kCases) {
    const StatusOr<ForwardConfig> config =
        SelectForwardConfig(expected.shape, {}, expected.options);
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config.value().ToString(), expected.expected);
  }
}

// One route per token: the traffic of a 64-rank domain.
TEST(ForwardConfigTest, TheSharedExpertReducesTokensOfOneRoute) {
  ForwardLayerShape shape = Kimi();
  shape.topk = 1;
  shape.max_tokens = 16384;
  shape.shared_intermediate = 256;
  const ForwardConfig config = SelectForwardConfig(shape, {}, {}).value();
  EXPECT_EQ(config.fused_forward_reduce, 2);
  EXPECT_NE(config.ToString().find("fused with 2 tiles of SharedDown, 2 of SharedInputGrad"),
            std::string::npos);
  shape.shared_intermediate = 0;
  EXPECT_EQ(SelectForwardConfig(shape, {}, {}).value().fused_forward_reduce, 0);
  EXPECT_EQ(SelectForwardConfig(Kimi(), {}, {}).value().fused_forward_reduce, 0);
}

TEST(ForwardConfigTest, OneMacrobatchIsCertainWhereTheRingHasRoomForEveryRouting) {
  EXPECT_FALSE(SelectForwardConfig(Kimi(), {}, {}).value().one_macrobatch);
  // 32,768 routes, and six experts with one row in their last block.
  const int64_t capacity = 128 * (6 + (2 * 2048 * 8 - 6) / 128);
  EXPECT_TRUE(
      SelectForwardConfig(Kimi(), {}, {.macrobatch_rows = capacity}).value().one_macrobatch);
  EXPECT_FALSE(
      SelectForwardConfig(Kimi(), {}, {.macrobatch_rows = capacity - 128}).value().one_macrobatch);
  ForwardLayerShape shape = Kimi();
  shape.ep_size = 1;
  shape.num_experts = shape.num_local_experts;
  EXPECT_TRUE(SelectForwardConfig(shape, {}, {}).value().one_macrobatch);
}

TEST(ForwardConfigTest, OddWidthsUseNaturalColumns) {
  for (const int64_t width : {2880, 40, 8}) {
    ForwardLayerShape shape = Kimi();
    shape.shared_intermediate = width;
    const bool permuted = width % 32 == 0;
    EXPECT_EQ(SelectForwardConfig(shape, {}, {}).value().order,
              permuted ? ColumnOrder::kPermuted : ColumnOrder::kNatural);
  }
}

TEST(ForwardConfigTest, ChunksCoverARowEvenly) {
  for (int64_t hidden = 8; hidden < 20000; hidden += 8) {
    ForwardLayerShape shape = Kimi();
    shape.hidden = hidden;
    const ForwardConfig config = SelectForwardConfig(shape, {}, {}).value();
    EXPECT_EQ(config.chunk_bytes % 16, 0u);
    EXPECT_LE(config.chunk_bytes, 8192u);
    const int64_t chunks = (2 * hidden + config.chunk_bytes - 1) / config.chunk_bytes;
    EXPECT_EQ(chunks, (2 * hidden + 8191) / 8192) << hidden;
  }
}

TEST(ForwardConfigTest, OneRankIsNotPaced) {
  ForwardLayerShape shape = Kimi();
  shape.ep_size = 1;
  EXPECT_EQ(SelectForwardConfig(shape, {}, {}).value().push_interval_ns, 0u);
}

TEST(ForwardConfigTest, ErrorsNameTheField) {
  const auto error = [](const ForwardLayerShape& shape, const ForwardOptions& options) {
    const StatusOr<ForwardConfig> config = SelectForwardConfig(shape, {}, options);
    EXPECT_FALSE(config.ok());
    return config.ok() ? std::string() : std::string(config.status().message());
  };
  ForwardLayerShape shape = Kimi();
  shape.hidden = 7170;
  EXPECT_EQ(error(shape, {}), "hidden: expected a multiple of 8 from 8 to 2^31 - 1, got 7170");
  shape = Kimi();
  shape.ep_size = 73;
  EXPECT_EQ(error(shape, {}), "ep_size: expected 1 to 72, got 73");
  EXPECT_EQ(error(Kimi(), {.num_sms = 133}), "num_sms: expected 0 to 132, got 133");
  EXPECT_EQ(error(Kimi(), {.num_comm_sms = 132}), "num_comm_sms: expected 0 to 131, got 132");
  EXPECT_EQ(error(Kimi(), {.minibatch_rows = 100}),
            "minibatch_rows: expected a multiple of 128 from 0 to 2^31 - 1, got 100");
}

}  // namespace
}  // namespace mok
