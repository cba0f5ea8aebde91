// Memory that callers hand to the C API: overlaps, alignment, pointers that would be ignored, sizes
// that overflow. Errors name the argument, and the call after the error works.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "mok_core/status.h"
#include "mok_megakernel/argument_pointers.h"
#include "mok_megakernel/layer_test_support.h"

namespace mok::testing {
namespace {

constexpr int64_t kMost = INT64_MAX;

class MemoryArgumentsTest : public ::testing::Test {
 protected:
  MemoryArgumentsTest() : data_(OneRankLayer()), workspaces_(data_.spec), layer_(data_, 0, {}) {
    EXPECT_EQ(layer_.BuildSchedule(workspaces_[0]), MOK_OK) << mok_last_error();
    EXPECT_EQ(forward_(), MOK_OK) << mok_last_error();
  }

  const Call forward_ = [this] { return layer_.Forward(workspaces_[0]); };
  const Call backward_ = [this] { return layer_.Backward(workspaces_[0]); };

  LayerData data_;
  RankWorkspaces workspaces_;
  RankLayer layer_;
};

TEST_F(MemoryArgumentsTest, ForwardWritesToMemoryOfItsOwn) {
  std::vector<Pointer> written = ContextOf(layer_.forward_args);
  written.emplace_back("out", layer_.forward_args.out);
  std::vector<Pointer> read = InputsOf(layer_.forward_args);
  read.emplace_back("shared_scale", layer_.forward_args.layer.shared_scale);
  ExpectApart(forward_, written, read);
  EXPECT_EQ(forward_(), MOK_OK) << mok_last_error();
}

TEST_F(MemoryArgumentsTest, BackwardWritesToMemoryOfItsOwn) {
  layer_.backward_args.kept_macrobatches = 0;  // a moved ring holds no x
  std::vector<Pointer> written = ContextOf(layer_.backward_args);
  for (const Pointer& gradient : GradientsOf(layer_.backward_args)) written.push_back(gradient);
  std::vector<Pointer> read = InputsOf(layer_.backward_args);
  read.emplace_back("d_out", layer_.backward_args.d_out);
  read.emplace_back("shared_scale", layer_.backward_args.layer.shared_scale);
  ExpectApart(backward_, written, read);
  EXPECT_EQ(backward_(), MOK_OK) << mok_last_error();
}

TEST_F(MemoryArgumentsTest, OneCommonElementIsAnOverlap) {
  auto* const x = static_cast<std::byte*>(const_cast<void*>(layer_.forward_args.layer.x));
  const int64_t bytes = 9 * 24 * 2;
  ExpectRefused(forward_, {"out", layer_.forward_args.out}, x + bytes - 2,
                StrCat("out: expected memory that does not overlap x, got ", bytes, " bytes at "));
}

// Weights that are one tensor, and the gradient that is the input.
TEST_F(MemoryArgumentsTest, WhatIsOnlyReadMayOverlap) {
  MokBackwardArgs& args = layer_.backward_args;
  layer_.forward_args.layer.routed.up = layer_.forward_args.layer.routed.gate;
  args.layer.routed.up = args.layer.routed.gate;
  args.d_out = args.layer.x;
  EXPECT_EQ(forward_(), MOK_OK) << mok_last_error();
  EXPECT_EQ(backward_(), MOK_OK) << mok_last_error();
}

TEST_F(MemoryArgumentsTest, TensorsAreAlignedToTheirElements) {
  const auto expect = [&](const Call& call, const std::vector<Pointer>& pointers) {
    for (const Pointer& pointer : pointers) {
      ExpectRefused(call, pointer, static_cast<std::byte*>(*pointer.place) + 1,
                    pointer.name + ": expected an address aligned to ");
    }
  };
  expect(forward_, InputsOf(layer_.forward_args));
  expect(forward_, ContextOf(layer_.forward_args));
  expect(forward_, {{"out", layer_.forward_args.out}});
  expect(backward_, InputsOf(layer_.backward_args));
  expect(backward_, GradientsOf(layer_.backward_args));
  expect(backward_, {{"d_out", layer_.backward_args.d_out}});
  expect([this] { return layer_.BuildSchedule(workspaces_[0]); },
         {{"topk_idx", layer_.schedule_args.topk_idx}});
}

TEST_F(MemoryArgumentsTest, RingRowsAreOfThisWorld) {
  layer_.forward_args.context.ring_rows = kMost;
  EXPECT_EQ(forward_(), MOK_INVALID_ARGUMENT);
  EXPECT_STREQ(mok_last_error(),
               "context.ring_x: expected at most 2^45 bytes, got [9223372036854775807, 24] of 2 "
               "bytes");
}

// As the scale without a shared expert: what would be ignored is refused.
TEST(UnusedArgumentsTest, NoSharedExpertHasNoTensors) {
  LayerSpec spec = OneRankLayer();
  spec.shared_intermediate = 0;
  spec.shared_scale = false;
  const LayerData data(spec);
  const RankWorkspaces workspaces(spec);
  RankLayer layer(data, 0, {});
  ASSERT_EQ(layer.BuildSchedule(workspaces[0]), MOK_OK);
  ASSERT_EQ(layer.Forward(workspaces[0]), MOK_OK) << mok_last_error();
  float number = 0;
  const auto expect = [&](const Pointer& pointer, auto call) {
    *pointer.place = &number;
    EXPECT_EQ((layer.*call)(workspaces[0]), MOK_INVALID_ARGUMENT);
    EXPECT_EQ(mok_last_error(), pointer.name + ": expected null without a shared expert");
    *pointer.place = nullptr;
  };
  MokLayer& forward = layer.forward_args.layer;
  for (const Pointer& pointer : {Pointer{"shared.gate", forward.shared.gate},
                                 {"shared.up", forward.shared.up},
                                 {"shared.down", forward.shared.down},
                                 {"shared_scale", forward.shared_scale}}) {
    expect(pointer, &RankLayer::Forward);
  }
  MokWeightGrads& grads = layer.backward_args.d_shared;
  for (const Pointer& pointer : {Pointer{"d_shared.gate", grads.gate},
                                 {"d_shared.up", grads.up},
                                 {"d_shared.down", grads.down}}) {
    expect(pointer, &RankLayer::Backward);
  }
  EXPECT_EQ(layer.Backward(workspaces[0]), MOK_OK) << mok_last_error();
}

TEST(CapacityTest, WhatDoesNotFitIsReported) {
  EXPECT_EQ(mok_schedule_capacity_rows(65, 2, 2), 3 * 128);
  EXPECT_EQ(mok_schedule_capacity_rows(0, 0, 0), 0);
  EXPECT_EQ(mok_schedule_capacity_rows(kMost / 2, 2, 0), 0);
  EXPECT_STREQ(mok_last_error(), "");
  const auto expect = [](int64_t tokens, int32_t topk, int32_t experts, const std::string& text) {
    EXPECT_EQ(mok_schedule_capacity_rows(tokens, topk, experts), -1);
    EXPECT_EQ(mok_last_error(), text);
  };
  expect(-1, 2, 2, "num_tokens_total: expected 0 to 9223372036854775807, got -1");
  expect(1, -2, 2, "topk: expected 0 to 2147483647, got -2");
  expect(1, 2, -3, "num_local_experts: expected 0 to 2147483647, got -3");
  const std::string text = "num_tokens_total * topk: expected rows that fit int64, got ";
  expect(int64_t{1} << 62, 4, 1, text + "4611686018427387904 * 4");
  expect(kMost, 1, 8, text + "9223372036854775807 * 1");
}

TEST(MatmulMemoryTest, OutputOverlapsNoInput) {
  std::vector<float> memory(12);
  MokMatmulArgs args{};
  args.struct_size = sizeof(args);
  args.isa = -1;
  args.m = args.n = args.k = 2;
  args.a = args.b = memory.data();  // one matrix squared
  args.c = memory.data() + 4;
  EXPECT_EQ(mok_matmul(&args), MOK_OK) << mok_last_error();
  args.c = memory.data() + 3;
  EXPECT_EQ(mok_matmul(&args), MOK_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(mok_last_error()).rfind("c: expected memory that does not overlap a", 0),
            0u);
  args.c = memory.data() + 4;
  args.b = memory.data() + 7;
  EXPECT_EQ(mok_matmul(&args), MOK_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(mok_last_error()).rfind("c: expected memory that does not overlap b", 0),
            0u);
  args.b = nullptr;
  EXPECT_EQ(mok_matmul(&args), MOK_INVALID_ARGUMENT);
  EXPECT_STREQ(mok_last_error(), "b: expected a pointer, got null");
  args.k = 0;  // an empty sum reads nothing
  EXPECT_EQ(mok_matmul(&args), MOK_OK) << mok_last_error();
  args.m = args.n = INT32_MAX;
  EXPECT_EQ(mok_matmul(&args), MOK_INVALID_ARGUMENT);
  EXPECT_STREQ(mok_last_error(),
               "c: expected at most 2^45 bytes, got [2147483647, 2147483647] of 4 bytes");
}

}  // namespace
}  // namespace mok::testing
