#include "mok_gemm/host/token_reduce.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "mok_gemm/host/test_matrix.h"

namespace mok {
namespace {

class TokenReduceTest : public testing::TestWithParam<IsaAndDType> {};

INSTANTIATE_TEST_SUITE_P(AllIsas, TokenReduceTest, testing::ValuesIn(AllIsasAndDTypes()),
                         [](const auto& info) { return TestName(info.param); });

// A reduction whose rows without a route hold NaN.
struct Case {
  Case(DType dtype, int64_t tokens, int64_t hidden, int topk)
      : shared(dtype, tokens, hidden),
        scale(DType::kFp32, 1, tokens),
        y(dtype, tokens * topk, hidden),
        weights(DType::kFp32, 1, tokens * topk),
        out(dtype, tokens, hidden) {
    shared.FillNormal(1);
    scale.FillNormal(2);
    y.FillNormal(3);
    weights.FillNormal(4);
    std::mt19937 generator(5);
    for (int64_t route = 0; route < tokens * topk; ++route) {
      expert_ids.push_back(generator() % 4 == 0 ? -1 : static_cast<int32_t>(generator() % 64));
      if (expert_ids.back() >= 0) continue;
      for (int64_t c = 0; c < hidden; ++c) y.Set(route, c, __builtin_nan(""));
      weights.Set(0, route, __builtin_nan(""));
    }
    tile.tokens = tokens;
    tile.hidden = hidden;
    tile.topk = topk;
    tile.dtype = dtype;
    tile.shared = shared.at();
    tile.shared_stride = shared.stride();
    tile.shared_scale = static_cast<const float*>(scale.at());
    tile.y = y.at();
    tile.y_stride = y.stride();
    tile.expert_ids = expert_ids.data();
    tile.weights = static_cast<const float*>(weights.at());
    tile.out = out.at();
    tile.out_stride = out.stride();
  }

  Reference Expected() const {
    Reference sum(tile.tokens, tile.hidden);
    for (int64_t t = 0; t < tile.tokens; ++t) {
      for (int64_t c = 0; c < tile.hidden; ++c) {
        if (tile.shared != nullptr) {
          sum(t, c) = shared.Get(t, c) * (tile.shared_scale != nullptr ? scale.Get(0, t) : 1.0);
        }
        for (int64_t route = t * tile.topk; route < (t + 1) * tile.topk; ++route) {
          if (expert_ids[route] < 0) continue;
          sum(t, c) += y.Get(route, c) * (tile.weights != nullptr ? weights.Get(0, route) : 1.0);
        }
      }
    }
    return sum;
  }

  TestMatrix shared, scale, y, weights, out;
  std::vector<int32_t> expert_ids;
  TokenReduceTile tile;
};

TEST_P(TokenReduceTest, MatchesReference) {
  for (int64_t hidden = 32; hidden <= 200; ++hidden) {
    SCOPED_TRACE(hidden);
    Case test(GetParam().dtype, 7, hidden, 3);
    TokenReduce(GetParam().isa, test.tile);
    ASSERT_EQ(Mismatch(test.out, test.Expected()), "");
  }
}

TEST_P(TokenReduceTest, OptionalPartsMayBeAbsent) {
  for (const int topk : {1, 2, 8}) {
    Case test(GetParam().dtype, 19, 88, topk);
    test.tile.shared_scale = nullptr;
    TokenReduce(GetParam().isa, test.tile);
    EXPECT_EQ(Mismatch(test.out, test.Expected()), "");
    test.tile.weights = nullptr;
    TokenReduce(GetParam().isa, test.tile);
    EXPECT_EQ(Mismatch(test.out, test.Expected()), "");
    test.tile.shared = nullptr;
    TokenReduce(GetParam().isa, test.tile);
    EXPECT_EQ(Mismatch(test.out, test.Expected()), "");
  }
}

TEST_P(TokenReduceTest, NoRouteAndNoSharedTermGiveZero) {
  Case test(GetParam().dtype, 5, 33, 4);
  for (int32_t& id : test.expert_ids) id = -1;
  test.y.Fill(__builtin_nan(""));
  test.tile.shared = nullptr;
  TokenReduce(GetParam().isa, test.tile);
  TestMatrix zeros(GetParam().dtype, 5, 33);
  EXPECT_EQ(test.out.Bits(), zeros.Fill(0.0).Bits());
  test.tile.tokens = 0;
  test.tile.out = nullptr;
  TokenReduce(GetParam().isa, test.tile);
}

TEST_P(TokenReduceTest, OutMayBeShared) {
  Case test(GetParam().dtype, 6, 70, 2);
  TokenReduce(GetParam().isa, test.tile);
  test.tile.out = test.shared.at();
  test.tile.out_stride = test.shared.stride();
  TokenReduce(GetParam().isa, test.tile);
  EXPECT_EQ(test.shared.Bits(), test.out.Bits());
}

// The same rows in another order, named by y_rows.
TEST_P(TokenReduceTest, RowsInAnyOrder) {
  Case test(GetParam().dtype, 11, 150, 3);
  TokenReduce(GetParam().isa, test.tile);
  const std::string in_order = test.out.Bits();
  constexpr int64_t kRows = 33;
  TestMatrix shuffled(GetParam().dtype, kRows, 150);
  std::vector<int32_t> y_rows;
  for (int64_t route = 0; route < kRows; ++route) {
    const int64_t row = route * 7 % kRows;
    for (int64_t c = 0; c < 150; ++c) shuffled.Set(row, c, test.y.Get(route, c));
    y_rows.push_back(test.expert_ids[route] < 0 ? -1 : static_cast<int32_t>(row));
  }
  test.tile.y = shuffled.at();
  test.tile.y_stride = shuffled.stride();
  test.tile.y_rows = y_rows.data();
  test.out.Fill(0.0);
  TokenReduce(GetParam().isa, test.tile);
  EXPECT_EQ(test.out.Bits(), in_order);
}

// A token's bits do not depend on the tokens around it.
TEST_P(TokenReduceTest, TokensAreIndependent) {
  Case test(GetParam().dtype, 9, 130, 3);
  TokenReduce(GetParam().isa, test.tile);
  const std::string whole = test.out.Bits();
  test.out.Fill(0.0);
  for (int64_t t = 0; t < 9; ++t) {
    TokenReduceTile one = test.tile;
    one.tokens = 1;
    one.shared = test.shared.at(t);
    one.shared_scale += t;
    one.y = test.y.at(t * 3);
    one.expert_ids += t * 3;
    one.weights += t * 3;
    one.out = test.out.at(t);
    TokenReduce(GetParam().isa, one);
  }
  EXPECT_EQ(test.out.Bits(), whole);
}

}  // namespace
}  // namespace mok
