// The CUDA C API in the emulator: small layers against float64, bits over ranks, errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "mok_core/device/runtime.h"
#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_megakernel/cuda/cuda_ranks_test_support.h"
#include "mok_megakernel/cuda/cuda_test_cases.h"

namespace mok::testing {
namespace {

using ::testing::MatchesRegex;

constexpr double kTensorTolerance = 4e-3;
constexpr double kRowTolerance = 2e-2;

void ExpectCorrect(const LayerData& data, const Tensor& out, const std::string& label) {
  const ReferenceResult reference = RunReference(ReferenceInputsOf(data));
  EXPECT_LE(RelativeError(out, reference.out), kTensorTolerance) << label;
  EXPECT_LE(WorstRowError(out, reference.out, data.spec.hidden), kRowTolerance) << label;
}

TEST(MokCudaTest, OneRankMatchesFloat64) {
  for (const bool limited : {false, true}) {
    LayerSpec spec = SharedLayer(1);
    spec.swiglu_limit = limited ? 0.5f : 0.0f;
    spec.x_scale = limited ? 1 : 0.02;
    const LayerData data(spec);
    ExpectCorrect(data, RunForward(data, {}), limited ? "clamped" : "plain");
  }
}

TEST(MokCudaTest, RanksOfOneAndOfSeveralDevicesGiveTheBitsOfOneRank) {
  const LayerData one(SharedLayer(1));
  const Tensor expected = RunForward(one, {});
  ExpectCorrect(one, expected, "one rank");
  ForEachPlacement(
      [&](const LayerData& data, const CudaRanksOptions& options, const std::string& label) {
        EXPECT_EQ(RunForward(data, options), expected) << label;
      });
}

TEST(MokCudaTest, SettingsChangeNoBit) {
  const LayerData data(LongSharedLayer());
  const Tensor expected = RunForward(data, OwnDevices());
  ExpectCorrect(data, expected, "defaults");
  CudaRanksOptions options = SpreadOptions();
  EXPECT_EQ(RunForward(data, options), expected) << "several macrobatches, one exchange SM";
  options.macrobatch_rows = -1;
  options.x_in_heap = true;
  EXPECT_EQ(RunForward(data, options), expected) << "x in the heap";
  options = OwnDevices();
  options.num_sms = 5;
  options.layer_num_sms = 2;
  EXPECT_EQ(RunForward(data, options), expected) << "few SMs of many";
}

// What is queued again without the host, as a graph does it, takes the ids of the moment. Memory
// that a call has to write is full of NaN before.
TEST(MokCudaTest, CallsFollowEachOtherWithOtherRoutes) {
  const LayerSpec spec = SharedLayer();
  const LayerData data(spec);
  const CudaRanksOptions options = OwnDevices();
  const std::vector<std::function<int64_t(int64_t, int)>> routings = {
      nullptr, [](int64_t, int) { return 3; }, [](int64_t, int) { return -1; },
      [](int64_t token, int k) { return token % 3 == 0 ? -1 : (token + k) % 4; }};
  std::vector<LayerData> batches;
  std::vector<Tensor> expected;
  for (const auto& routing : routings) {
    LayerSpec routed = spec;
    routed.route = routing;
    batches.push_back(data);
    batches.back().topk_idx = LayerData(routed).topk_idx;
    expected.push_back(RunForward(batches.back(), options));
    const ReferenceResult reference = RunReference(ReferenceInputsOf(batches.back()));
    EXPECT_LE(WorstRowError(expected.back(), reference.out, spec.hidden), kRowTolerance);
  }
  StartCase({1, 0.1});
  CudaRanks ranks(data, options);
  for (size_t i = 0; i < routings.size(); ++i) {
    ranks.SetIds(batches[i].topk_idx);
    ranks.Poison();
    ranks.QueueAll();
    RunQueued();
    EXPECT_EQ(ranks.Out(), expected[i]) << "routing " << i;
  }
}

TEST(MokCudaTest, NoTokensAndNoExperts) {
  for (const bool own_devices : {false, true}) {
    LayerSpec spec = SharedLayer();
    spec.tokens = {0, 0};
    CudaRanksOptions options;
    options.own_devices = own_devices;
    EXPECT_EQ(RunForward(LayerData(spec), options).size(), 0);
  }
}

// What is left is the shared expert.
TEST(MokCudaTest, NoExpertsAnywhere) {
  for (const std::vector<int64_t>& tokens : std::vector<std::vector<int64_t>>{{29}, {9, 20}}) {
    LayerSpec spec = SharedLayer(1);
    spec.tokens = tokens;
    spec.experts.assign(tokens.size(), 0);
    spec.route = [](int64_t, int) { return -1; };
    const LayerData data(spec);
    const CudaRanksOptions options = OwnDevices();
    ExpectCorrect(data, RunForward(data, options), StrCat(tokens.size(), " ranks"));
  }
}

TEST(MokCudaTest, AMissingRankIsNamedForEver) {
  const LayerData data(SharedLayer());
  for (const bool in_forward : {false, true}) {
    StartCase({1, 0.1}, true);
    const CudaRanksOptions options = OwnDevices();
    CudaRanks ranks(data, options);
    ranks.Poison();  // a pass without rows reads some of it
    EXPECT_EQ(ranks.BuildSchedule(0), MOK_OK);
    if (in_forward) {
      EXPECT_EQ(ranks.BuildSchedule(1), MOK_OK);
    }
    EXPECT_EQ(ranks.Forward(0), MOK_OK);
    RunQueued();
    for (int repeat = 0; repeat < 2; ++repeat) {
      EXPECT_EQ(ranks.BuildSchedule(0), MOK_DEADLINE_EXCEEDED);
      EXPECT_THAT(
          mok_last_error(),
          MatchesRegex(in_forward ? "rank 0 waited 2... ms for rank 1 at the entry of pass 1, "
                                    "which it last reached in pass 0"
                                  : "rank 0 waited 2... ms for the expert ids of rank 1 in batch "
                                    "1, which it last sent in batch 0"));
      EXPECT_EQ(ranks.Forward(0), MOK_DEADLINE_EXCEEDED);
      EXPECT_EQ(ranks.Check(0), MOK_DEADLINE_EXCEEDED);
    }
  }
}

// Words of a schedule of rank 0 against the bound that compilers plan with.
void ExpectWordsBelowBound(int32_t ranks, int64_t tokens, int32_t experts, int64_t macrobatch) {
  MokCudaOptions options{};
  options.struct_size = sizeof(options);
  options.ep_size = ranks;
  options.max_tokens = tokens;
  options.hidden = 64;
  options.topk = 3;
  options.num_sms = 132;
  options.timeout_seconds = 1;
  StartCase({1, 0.1});
  MokCudaMemory memory{};
  memory.struct_size = sizeof(memory);
  ASSERT_EQ(mok_cuda_memory(&options, &memory), MOK_OK) << mok_last_error();
  const auto allocate = [](int64_t bytes) {
    return runtime::AllocateDevice(0, static_cast<size_t>(bytes), "memory").value();
  };
  std::vector<void*> heaps;
  for (int32_t rank = 0; rank < ranks; ++rank) heaps.push_back(allocate(memory.heap_bytes));
  void* state = allocate(memory.state_bytes);
  MokCudaAddresses addresses{sizeof(addresses), heaps.data(), state, heaps[0]};
  MokCudaWorkspace* workspace = nullptr;
  ASSERT_EQ(mok_cuda_workspace_create(&options, &addresses, &workspace), MOK_OK);
  MokCudaLayer layer{};
  layer.struct_size = sizeof(layer);
  layer.num_local_experts = experts;
  layer.num_experts = experts;
  layer.intermediate = 8;
  layer.num_tokens = tokens;
  layer.macrobatch_rows = macrobatch;
  MokCudaLayerMemory sizes{};
  sizes.struct_size = sizeof(sizes);
  ASSERT_EQ(mok_cuda_layer_memory(workspace, &layer, &sizes), MOK_OK) << mok_last_error();
  const int64_t most_tokens = ranks * tokens;
  const int64_t capacity = mok_schedule_capacity_rows(most_tokens, options.topk, experts);
  EXPECT_LE(sizes.schedule_bytes / 4, MOK_CUDA_SCHEDULE_HEADER_WORDS + 3 * experts + 2 * capacity +
                                          4 * (capacity / 128) + most_tokens);
  mok_cuda_workspace_destroy(workspace);
}

TEST(MokCudaTest, ScheduleWordsStayBelowTheirBound) {
  for (const int64_t tokens : {0, 1, 9, 300, 5000}) {
    for (const int32_t experts : {0, 1, 7, 300}) {
      for (const int64_t macrobatch : {-1, 0, 1, 4096}) {
        ExpectWordsBelowBound(1, tokens, experts, macrobatch);
        ExpectWordsBelowBound(3, tokens, experts, macrobatch);
      }
    }
  }
}

}  // namespace
}  // namespace mok::testing
