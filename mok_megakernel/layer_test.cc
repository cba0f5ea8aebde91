// The whole layer against the float64 reference: ordinary shapes, and every odd one that a router
// or a user may come up with. Sizes in a case differ from each other, so that a swap shows.
#include <gtest/gtest.h>

#include <cmath>

#include "mok_megakernel/layer_test_support.h"

namespace mok::testing {
namespace {

// Runs with poisoned memory and two workers unless the case says otherwise.
RunOptions Options() {
  RunOptions options;
  options.threads = 2;
  options.poison = true;
  return options;
}

LayerSpec OrdinarySpec() {
  LayerSpec spec;
  spec.tokens = {150, 170};
  spec.experts = {3, 2};
  spec.topk = 2;
  spec.hidden = 136;
  spec.intermediate = 200;
  spec.shared_intermediate = 72;
  return spec;
}

void ExpectCorrect(const LayerSpec& spec, const RunOptions& options = Options()) {
  const LayerData data(spec);
  ExpectMatchesReference(data, RunLayer(data, options));
}

TEST(LayerTest, OneRank) {
  LayerSpec spec = OrdinarySpec();
  spec.tokens = {310};
  spec.experts = {5};
  ExpectCorrect(spec);
}

TEST(LayerTest, TwoRanks) { ExpectCorrect(OrdinarySpec()); }

TEST(LayerTest, Float32) {
  LayerSpec spec = OrdinarySpec();
  spec.dtype = DType::kFp32;
  ExpectCorrect(spec);
}

TEST(LayerTest, GradientsInTheActivationsDType) {
  RunOptions options = Options();
  options.grad_dtype = DType::kBf16;
  ExpectCorrect(OrdinarySpec(), options);
}

TEST(LayerTest, WithoutSharedExpert) {
  LayerSpec spec = OrdinarySpec();
  spec.shared_intermediate = 0;
  ExpectCorrect(spec);
}

TEST(LayerTest, SharedExpertWiderThanRoutedAndScaled) {
  LayerSpec spec = OrdinarySpec();
  spec.shared_intermediate = 424;
  spec.shared_scale = true;
  ExpectCorrect(spec);
}

TEST(LayerTest, SwigluLimit) {
  for (const DType dtype : {DType::kBf16, DType::kFp32}) {
    LayerSpec spec = OrdinarySpec();
    spec.dtype = dtype;
    spec.swiglu_limit = 0.75f;
    spec.x_scale = 1;  // a third of the gates and half of the ups are clamped
    ExpectCorrect(spec);
  }
}

TEST(LayerTest, LargeInputs) {
  LayerSpec spec = OrdinarySpec();
  spec.x_scale = 1;
  ExpectCorrect(spec);
}

TEST(LayerTest, OddMultiplesOfEight) {
  LayerSpec spec = OrdinarySpec();
  spec.hidden = 8 * 33;
  spec.intermediate = 8 * 17;
  spec.shared_intermediate = 8;
  ExpectCorrect(spec);
}

TEST(LayerTest, ThreeRanksWithFewAndNoTokens) {
  LayerSpec spec = OrdinarySpec();
  spec.tokens = {0, 5, 17};
  spec.experts = {2, 2, 1};
  ExpectCorrect(spec);
}

TEST(LayerTest, NoTokensAnywhere) {
  LayerSpec spec = OrdinarySpec();
  spec.tokens = {0, 0};
  const LayerData data(spec);
  const LayerResult result = RunLayer(data, Options());
  ExpectMatchesReference(data, result);
  for (int64_t i = 0; i < result.d_gate.size(); ++i) ASSERT_EQ(result.d_gate.Get(i), 0.0);
}

TEST(LayerTest, ExpertsThatAreNoMultipleOfRanks) {
  LayerSpec spec = OrdinarySpec();
  spec.tokens = {60, 90, 75};
  spec.experts = {3, 2, 2};
  ExpectCorrect(spec);
}

TEST(LayerTest, RankWithoutExperts) {
  LayerSpec spec = OrdinarySpec();
  spec.tokens = {60, 90, 75};
  spec.experts = {4, 0, 1};
  ExpectCorrect(spec);
}

TEST(LayerTest, MoreRoutesThanLocalExperts) {
  LayerSpec spec = OrdinarySpec();
  spec.tokens = {40, 50, 45};
  spec.experts = {2, 2, 2};
  spec.topk = 5;
  ExpectCorrect(spec);
}

TEST(LayerTest, AllRoutesToOneExpert) {
  LayerSpec spec = OrdinarySpec();
  spec.route = [](int64_t, int) { return 3; };  // twice for each token
  ExpectCorrect(spec);
}

TEST(LayerTest, DuplicateAndMissingRoutes) {
  LayerSpec spec = OrdinarySpec();
  spec.topk = 4;
  spec.route = [](int64_t, int k) { return k < 2 ? 4 : -1; };
  const LayerData data(spec);
  const LayerResult result = RunLayer(data, Options());
  ExpectMatchesReference(data, result);
  for (int64_t route = 0; route < result.d_topk_weight.size(); ++route) {
    if (route % 4 >= 2) {
      ASSERT_EQ(result.d_topk_weight.Get(route), 0.0) << route;
    }
  }
}

TEST(LayerTest, TokensWithoutAnyRoute) {
  LayerSpec spec = OrdinarySpec();
  spec.shared_intermediate = 0;
  spec.route = [](int64_t token, int k) { return token % 3 == 0 ? -1 : (token + k) % 5; };
  const LayerData data(spec);
  const LayerResult result = RunLayer(data, Options());
  ExpectMatchesReference(data, result);
  for (int64_t i = 0; i < spec.hidden; ++i) {
    ASSERT_EQ(result.out.Get(i), 0.0);
    ASSERT_EQ(result.d_x.Get(i), 0.0);
  }
}

TEST(LayerTest, RouterWeightsOfZeroKeepTheirGradient) {
  LayerSpec spec = OrdinarySpec();
  spec.weight = [](int64_t token, int k) {
    return (token + k) % 2 == 0 ? 0.0f : 0.5f + 0.25f * static_cast<float>(k);
  };
  const LayerData data(spec);
  const LayerResult result = RunLayer(data, Options());
  ExpectMatchesReference(data, result);
  EXPECT_NE(result.d_topk_weight.Get(0), 0.0);  // of token 0, k 0, whose weight is 0
}

// Row blocks are 128 rows, and vectors and tiles smaller powers of two: the counts around them.
TEST(LayerTest, ExpertRowCountsAroundPowersOfTwo) {
  const std::vector<int64_t> counts = {1, 31, 32, 33, 127, 128, 129, 257};
  std::vector<int64_t> expert_of_token;
  for (size_t expert = 0; expert < counts.size(); ++expert) {
    expert_of_token.insert(expert_of_token.end(), static_cast<size_t>(counts[expert]),
                           static_cast<int64_t>(expert));
  }
  LayerSpec spec = OrdinarySpec();
  spec.topk = 1;
  spec.hidden = 72;
  spec.intermediate = 56;
  spec.shared_intermediate = 0;
  spec.tokens = {400, 338};
  spec.experts = {4, 4};
  spec.route = [&](int64_t token, int) { return expert_of_token[static_cast<size_t>(token)]; };
  ASSERT_EQ(spec.num_tokens(), static_cast<int64_t>(expert_of_token.size()));
  ExpectCorrect(spec);
}

LayerSpec MostlyEmptySpec() {
  LayerSpec spec;
  spec.tokens = {19, 14};
  spec.experts = {128, 128};
  spec.topk = 1;
  spec.hidden = 88;
  spec.intermediate = 120;
  spec.route = [](int64_t, int) { return 200; };
  return spec;
}

TEST(LayerTest, EmptyExpertsHaveZeroGradients) {
  const LayerData data(MostlyEmptySpec());
  const LayerResult result = RunLayer(data, Options());
  ExpectMatchesReference(data, result);
  const int64_t expert_size = data.spec.hidden * data.spec.intermediate;
  for (int64_t i = 0; i < result.d_gate.size(); ++i) {
    if (i / expert_size == 200) continue;
    ASSERT_EQ(result.d_gate.Get(i), 0.0);
    ASSERT_EQ(result.d_up.Get(i), 0.0);
    ASSERT_EQ(result.d_down.Get(i), 0.0);
  }
}

TEST(LayerTest, AccumulationLeavesEmptyExpertsAlone) {
  const LayerData data(MostlyEmptySpec());
  for (const DType grad_dtype : {DType::kFp32, DType::kBf16}) {
    RunOptions options = Options();
    options.grad_dtype = grad_dtype;
    options.accumulate = true;
    options.initial_grad = NAN;  // any arithmetic on it would change its bits or show
    const LayerResult result = RunLayer(data, options);
    const int64_t expert_size = data.spec.hidden * data.spec.intermediate;
    const Tensor untouched = [&] {
      Tensor tensor(grad_dtype, 1);
      tensor.Set(0, NAN);
      return tensor;
    }();
    for (int64_t i = 0; i < result.d_down.size(); ++i) {
      if (i / expert_size == 200) continue;
      for (const Tensor* gradient : {&result.d_gate, &result.d_up, &result.d_down}) {
        Tensor element(grad_dtype, 1);
        element.bytes.assign(
            static_cast<const uint8_t*>(gradient->At(i)),
            static_cast<const uint8_t*>(gradient->At(i)) + ElementBytes(grad_dtype));
        ASSERT_TRUE(element == untouched) << i;
      }
    }
  }
}

TEST(LayerTest, AccumulationAddsOnce) {
  const LayerData data(OrdinarySpec());
  RunOptions options = Options();
  const LayerResult written = RunLayer(data, options);
  options.accumulate = true;
  options.initial_grad = 0.5;
  const LayerResult added = RunLayer(data, options);
  for (int64_t i = 0; i < written.d_gate.size(); ++i) {
    const auto sum = [&](const Tensor& gradient) {
      return static_cast<double>(0.5f + static_cast<float>(gradient.Get(i)));
    };
    ASSERT_EQ(added.d_gate.Get(i), sum(written.d_gate)) << i;
    ASSERT_EQ(added.d_up.Get(i), sum(written.d_up)) << i;
    ASSERT_EQ(added.d_down.Get(i), sum(written.d_down)) << i;
  }
  EXPECT_TRUE(added.d_x == written.d_x);
}

TEST(LayerTest, RecomputedMacrobatchesWithCarriedGradients) {
  LayerSpec spec = OrdinarySpec();
  spec.tokens = {300, 420};
  spec.route = [](int64_t token, int k) { return (token * token + k) % 7 < 5 ? 1 + k : 4; };
  RunOptions options = Options();
  options.minibatch_rows = 128;
  options.macrobatch_rows = 256;
  const LayerData data(spec);
  const LayerResult result = RunLayer(data, options);
  EXPECT_GE(result.most_macrobatches, 3);
  ExpectMatchesReference(data, result);
}

}  // namespace
}  // namespace mok::testing
