// Random layers, routings and engine configurations against the float64 reference, in fp32 so that
// a single wrong row or weight shows.
#include <gtest/gtest.h>

#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "mok_core/status.h"
#include "mok_megakernel/layer_test_support.h"

namespace mok::testing {
namespace {

class RandomCase {
 public:
  explicit RandomCase(uint32_t seed) : random_(seed) {
    spec.seed = seed;
    spec.dtype = DType::kFp32;
    const int64_t ep_size = Pick(1, 4);
    const int64_t most_tokens = Pick(0, 3) == 0 ? 3 : 60;
    spec.tokens.clear();
    spec.experts.clear();
    for (int64_t rank = 0; rank < ep_size; ++rank) {
      spec.tokens.push_back(Pick(0, most_tokens));
      spec.experts.push_back(static_cast<int32_t>(Pick(rank == 0 ? 1 : 0, 4)));
    }
    spec.topk = static_cast<int>(Pick(1, 5));
    spec.hidden = 8 * Pick(1, 12);
    spec.intermediate = 8 * Pick(1, 20);
    spec.shared_intermediate = 8 * Pick(-4, 9) > 0 ? 8 * Pick(1, 18) : 0;
    spec.shared_scale = spec.shared_intermediate > 0 && Pick(0, 1) == 1;
    MakeRoutes();
    options.threads = static_cast<int>(Pick(1, 3));
    options.comm_threads = static_cast<int>(Pick(0, 2));
    options.minibatch_rows = 128 * Pick(0, 3);
    options.macrobatch_rows = 128 * Pick(0, 4);
    options.kept_macrobatches = static_cast<int>(Pick(0, 1));
    options.poison = true;
  }

  std::string Label() const {
    std::ostringstream label;
    label << "seed " << spec.seed << ": ranks " << spec.ep_size() << ", tokens "
          << spec.num_tokens() << ", experts " << spec.num_experts() << ", topk " << spec.topk
          << ", hidden " << spec.hidden << ", intermediate " << spec.intermediate << ", shared "
          << spec.shared_intermediate << ", threads " << options.threads << "+"
          << options.comm_threads << ", minibatch " << options.minibatch_rows << ", macrobatch "
          << options.macrobatch_rows << ", kept " << options.kept_macrobatches;
    return label.str();
  }

  LayerSpec spec;
  RunOptions options;

 private:
  int64_t Pick(int64_t lowest, int64_t highest) {
    return std::uniform_int_distribution<int64_t>(lowest, highest)(random_);
  }

  // Balanced, or most routes to few experts; some routes missing, some experts twice for a token.
  void MakeRoutes() {
    const int64_t num_experts = spec.num_experts();
    const int64_t favourite = Pick(0, num_experts - 1);
    const int64_t skew = Pick(0, 4);
    const int64_t missing = Pick(0, 3);
    for (int64_t route = 0; route < spec.num_tokens() * spec.topk; ++route) {
      const bool is_missing = Pick(0, 9) < missing;
      const int64_t id = Pick(0, 4) < skew ? favourite : Pick(0, num_experts - 1);
      routes_.push_back(is_missing ? -1 : id);
    }
    const int topk = spec.topk;
    spec.route = [routes = routes_, topk](int64_t token, int k) {
      return routes[static_cast<size_t>(token * topk + k)];
    };
  }

  std::mt19937 random_;
  std::vector<int64_t> routes_;
};

TEST(RandomLayerTest, MatchesReference) {
  int64_t recomputing_cases = 0;
  for (uint32_t seed = 1; seed <= 300; ++seed) {
    const RandomCase random_case(seed);
    SCOPED_TRACE(random_case.Label());
    const LayerData data(random_case.spec);
    const LayerResult result = RunLayer(data, random_case.options);
    recomputing_cases += result.most_macrobatches > 1 ? 1 : 0;
    ExpectMatchesReference(data, result);
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GE(recomputing_cases, 80);
}

}  // namespace
}  // namespace mok::testing
