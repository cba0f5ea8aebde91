// Same inputs, same bits: over repeats, threads, communication threads, minibatches, macrobatches,
// recomputation, poisoned memory and numbers of ranks.
#include <gtest/gtest.h>

#include <numeric>

#include "mok_core/status.h"
#include "mok_gemm/host/isa.h"
#include "mok_megakernel/layer_test_support.h"

namespace mok::testing {
namespace {

// 261 tokens and 8 experts; two tiles over I, one expert with more than one row block.
LayerSpec SpecOf(DType dtype, std::vector<int64_t> tokens, std::vector<int32_t> experts) {
  LayerSpec spec;
  spec.dtype = dtype;
  spec.tokens = std::move(tokens);
  spec.experts = std::move(experts);
  spec.topk = 3;
  spec.hidden = 72;
  spec.intermediate = 136;
  spec.shared_intermediate = 40;
  spec.shared_scale = true;
  spec.route = [](int64_t token, int k) {
    if (token % 11 == 3 && k == 1) return int64_t{-1};
    return k == 0 ? 5 : (token * 7 + k * 3) % 8;
  };
  return spec;
}

LayerSpec OneRankSpec(DType dtype) { return SpecOf(dtype, {261}, {8}); }

std::string Label(const RunOptions& options) {
  return StrCat("threads ", options.threads, ", communication threads ", options.comm_threads,
                ", minibatch ", options.minibatch_rows, ", macrobatch ", options.macrobatch_rows,
                ", kept ", options.kept_macrobatches, ", isa ", options.isa);
}

class DeterminismTest : public ::testing::TestWithParam<DType> {};

TEST_P(DeterminismTest, Repeats) {
  const LayerData data(OneRankSpec(GetParam()));
  RunOptions options;
  const LayerResult first = RunLayer(data, options);
  const RankWorkspaces workspaces(data.spec);
  options.threads = 3;
  for (int repeat = 0; repeat < 10; ++repeat) {
    options.poison = repeat % 2 == 1;
    ExpectSameBits(first, RunLayer(data, options, workspaces), StrCat("repeat ", repeat));
  }
}

TEST_P(DeterminismTest, Threads) {
  const LayerData data(OneRankSpec(GetParam()));
  const LayerResult first = RunLayer(data, {});
  for (int threads = 1; threads <= 8; ++threads) {
    for (const int comm_threads : {0, 1, 2}) {
      RunOptions options;
      options.threads = threads;
      options.comm_threads = comm_threads;
      ExpectSameBits(first, RunLayer(data, options), Label(options));
    }
  }
}

TEST_P(DeterminismTest, MinibatchMacrobatchAndRecomputation) {
  const LayerData data(OneRankSpec(GetParam()));
  const LayerResult first = RunLayer(data, {});
  for (const int64_t macrobatch_rows : {-1, 0, 128, 256, 640}) {
    for (const int64_t minibatch_rows : {0, 128, 256, 100000}) {
      for (const int kept_macrobatches : {0, 1}) {
        RunOptions options;
        options.threads = 2;
        options.comm_threads = minibatch_rows == 256 ? 1 : 0;
        options.minibatch_rows = minibatch_rows;
        options.macrobatch_rows = macrobatch_rows;
        options.kept_macrobatches = kept_macrobatches;
        options.poison = true;
        const LayerResult result = RunLayer(data, options);
        ExpectSameBits(first, result, Label(options));
        if (macrobatch_rows == 128) {
          EXPECT_GT(result.most_macrobatches, 8);
        }
      }
    }
  }
}

TEST_P(DeterminismTest, NumberOfRanks) {
  const LayerData one_rank(OneRankSpec(GetParam()));
  const LayerResult first = RunLayer(one_rank, {});
  const std::vector<std::pair<std::vector<int64_t>, std::vector<int32_t>>> splits = {
      {{131, 130}, {4, 4}},
      {{0, 200, 61}, {3, 3, 2}},
      {{66, 65, 65, 65}, {2, 2, 2, 2}},
      {{1, 260, 0, 0}, {0, 7, 0, 1}},
      {{33, 33, 33, 33, 33, 32, 32, 32}, {1, 1, 1, 1, 1, 1, 1, 1}},
  };
  for (const auto& [tokens, experts] : splits) {
    const LayerData data(SpecOf(GetParam(), tokens, experts));
    for (const int64_t macrobatch_rows : {0, 128}) {
      RunOptions options;
      options.macrobatch_rows = macrobatch_rows;
      options.comm_threads = macrobatch_rows == 0 ? 0 : 1;
      ExpectSameBits(first, RunLayer(data, options),
                     StrCat(tokens.size(), " ranks, ", Label(options)));
    }
  }
}

// Bits may differ between ISAs, not within one.
TEST_P(DeterminismTest, EveryIsa) {
  const LayerData one_rank(OneRankSpec(GetParam()));
  const LayerData two_ranks(SpecOf(GetParam(), {131, 130}, {5, 3}));
  for (const Isa isa : SupportedIsas()) {
    RunOptions options;
    options.isa = static_cast<int>(isa);
    const LayerResult first = RunLayer(one_rank, options);
    options.threads = 2;
    options.macrobatch_rows = 128;
    options.kept_macrobatches = 0;
    ExpectSameBits(first, RunLayer(one_rank, options), Label(options));
    ExpectSameBits(first, RunLayer(two_ranks, options), StrCat("2 ranks, ", Label(options)));
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, DeterminismTest, ::testing::Values(DType::kBf16, DType::kFp32),
                         [](const auto& info) { return std::string(DTypeName(info.param)); });

}  // namespace
}  // namespace mok::testing
