// The backward through the CUDA C API in the emulator: against float64, bits over ranks and
// settings.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "mok_core/device/runtime.h"
#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_megakernel/cuda/cuda_ranks_test_support.h"
#include "mok_megakernel/cuda/cuda_test_cases.h"

namespace mok::testing {
namespace {

TEST(MokCudaBackwardTest, OneRankMatchesFloat64) {
  const LayerData data(SharedLayer(1));
  CudaRanksOptions options;
  const LayerResult expected = RunBoth(data, options);
  ExpectMatchesReference(data, expected);
  options.kept_macrobatches = 0;
  ExpectSameBits(expected, RunBoth(data, options), "recomputed");
  options.kept_macrobatches = 1;
  ExpectSameBits(expected, RunBoth(data, options, 2), "forward and backward again");
}

TEST(MokCudaBackwardTest, RanksOfOneAndOfSeveralDevicesGiveTheBitsOfOneRank) {
  const LayerResult expected = RunBoth(LayerData(SharedLayer(1)), {});
  ForEachPlacement(
      [&](const LayerData& data, const CudaRanksOptions& options, const std::string& label) {
        ExpectSameBits(expected, RunBoth(data, options), label);
      });
}

TEST(MokCudaBackwardTest, SettingsChangeNoBit) {
  const LayerData data(LongSharedLayer());
  const LayerResult expected = RunBoth(data, OwnDevices());
  ExpectMatchesReference(data, expected);
  ExpectSameBits(expected, RunBoth(data, SpreadOptions()), "several macrobatches, one exchange SM");
}

// Forward and backward; between them the staged x of all ranks is spoilt. Whether the backward has
// copied it again: on all ranks or on none.
bool BackwardStagesX(const LayerSpec& spec, CudaRanksOptions options,
                     const std::vector<int32_t>& kept) {
  const LayerData data(spec);
  StartCase({2, 0.1});
  options.own_devices = true;
  CudaRanks ranks(data, options);
  ranks.Poison();
  ranks.QueueAll();
  RunQueued();
  const auto row_bytes = static_cast<size_t>(spec.hidden) * sizeof(BFloat16);
  const auto bytes_of = [&](int rank) {
    return static_cast<size_t>(spec.tokens[rank]) * row_bytes;
  };
  const auto staged_x = [&](int rank) {
    return static_cast<std::byte*>(ranks.rank(rank).heap) + ranks.rank(rank).memory.x_offset;
  };
  for (int rank = 0; rank < spec.ep_size(); ++rank) {
    EXPECT_EQ(runtime::Fill(staged_x(rank), 0xFF, bytes_of(rank)), OkStatus());
    ranks.rank(rank).backward.kept_macrobatches = kept[rank];
  }
  ranks.QueueBackward();
  RunQueued();
  ExpectMatchesReference(data, ranks.Result());
  size_t copied = 0, all = 0;
  int64_t first_token = 0;
  for (int rank = 0; rank < spec.ep_size(); ++rank) {
    std::vector<std::byte> staged(bytes_of(rank));
    EXPECT_EQ(runtime::CopyToHost(staged.data(), staged_x(rank), staged.size()), OkStatus());
    const auto* x = reinterpret_cast<const std::byte*>(data.x.At(first_token * spec.hidden));
    first_token += spec.tokens[rank];
    all += staged.size();
    for (size_t i = 0; i < staged.size(); ++i) copied += staged[i] == x[i] ? 1 : 0;
  }
  EXPECT_TRUE(copied < all / 10 || copied == all) << copied << " bytes of " << all;
  return copied == all;
}

TEST(MokCudaBackwardTest, XIsCopiedOnlyIfARankComputesRowsAgain) {
  LayerSpec spec = SharedLayer();
  spec.tokens = {9, 0, 20};
  spec.experts = {1, 1, 2};
  EXPECT_FALSE(BackwardStagesX(spec, {}, {1, 1, 1}));
  EXPECT_TRUE(BackwardStagesX(spec, {}, {0, 0, 0}));
  EXPECT_TRUE(BackwardStagesX(spec, {}, {1, 0, 1})) << "one rank has kept nothing";
  CudaRanksOptions options;
  options.macrobatch_rows = 128;
  EXPECT_TRUE(BackwardStagesX(spec, options, {1, 1, 1})) << "rank 2 has two row blocks";
  spec.experts = {1, 1, 1};
  EXPECT_FALSE(BackwardStagesX(spec, options, {1, 1, 1}));
}

// x where the forward would copy it to: read there by the forward and by its backward, until
// another call has put its own x there.
TEST(MokCudaBackwardTest, XOfTheHeapIsTheForwardsOrRefused) {
  const LayerData data(SharedLayer());
  const LayerResult expected = RunBoth(data, OwnDevices());
  for (const bool is_backward : {false, true}) {
    CudaRanksOptions options = OwnDevices();
    options.x_in_heap = true;
    StartCase({1, 0.1});
    CudaRanks ranks(data, options);
    const auto x_of = [&](int rank) { return ranks.rank(rank).forward.layer.x; };
    const auto use_x = [&](int rank, const void* x) {
      ranks.rank(rank).forward.layer.x = ranks.rank(rank).backward.layer.x = x;
    };
    ranks.QueueAll();
    EXPECT_EQ(RunBoth(ranks).d_x, expected.d_x);
    ranks.QueueAll();
    RunQueued();
    std::vector<const void*> in_heap;
    for (int rank = 0; rank < 2; ++rank) {
      in_heap.push_back(x_of(rank));
      const size_t bytes = data.spec.tokens[rank] * data.spec.hidden * sizeof(BFloat16);
      void* const other = runtime::AllocateDevice(rank, bytes, "another x").value();
      ASSERT_EQ(runtime::Fill(other, 0, bytes), OkStatus());
      use_x(rank, other);
    }
    if (is_backward) {
      ranks.QueueBackward();
    } else {
      ranks.QueueAll();
    }
    RunQueued();
    for (int rank = 0; rank < 2; ++rank) {
      use_x(rank, in_heap[rank]);
      for (const int32_t part : {MOK_CUDA_WHOLE, MOK_CUDA_STAGE, MOK_CUDA_EXCHANGE}) {
        EXPECT_EQ(ranks.Backward(rank, part), MOK_FAILED_PRECONDITION);
        EXPECT_THAT(mok_last_error(), ::testing::StartsWith("x: lies where the workspace keeps x "
                                                            "for the other ranks, and another"));
      }
    }
  }
}

TEST(MokCudaBackwardTest, WeightGradientsAddToWhatIsThere) {
  const LayerData data(SharedLayer(1));
  CudaRanksOptions options;
  options.grad_dtype = DType::kFp32;
  const LayerResult written = RunBoth(data, options);
  ExpectMatchesReference(data, written);
  options.accumulate = true;
  options.initial_grad = 0.5;
  const LayerResult added = RunBoth(data, options);
  for (int64_t i = 0; i < written.d_up.size(); ++i) {
    ASSERT_EQ(added.d_up.Get(i), static_cast<float>(0.5f + static_cast<float>(written.d_up.Get(i))))
        << i;
  }
  EXPECT_TRUE(added.d_x == written.d_x);
}

TEST(MokCudaBackwardTest, NoTokens) {
  LayerSpec spec = SharedLayer();
  spec.tokens = {0, 0};
  for (const bool own_devices : {false, true}) {
    CudaRanksOptions options;
    options.own_devices = own_devices;
    const LayerResult result = RunBoth(LayerData(spec), options);
    for (int64_t i = 0; i < result.d_gate.size(); ++i) ASSERT_EQ(result.d_gate.Get(i), 0) << i;
  }
}

TEST(MokCudaBackwardTest, AMissingRankIsNamed) {
  const LayerData data(SharedLayer());
  StartCase({1, 0.1}, true);
  CudaRanks ranks(data, OwnDevices());
  ranks.QueueAll();
  EXPECT_EQ(ranks.Backward(0), MOK_OK) << mok_last_error();
  RunQueued();
  EXPECT_EQ(ranks.Check(0), MOK_DEADLINE_EXCEEDED);
  EXPECT_THAT(mok_last_error(),
              ::testing::MatchesRegex("rank 0 waited 2... ms for rank 1 at the start of pass 2, a "
                                      "backward; the last that it has started is pass 0"));
}

}  // namespace
}  // namespace mok::testing
