// Test only: layers on the CUDA C API, and how the tests of both passes run them in the emulator.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "mok_core/device/runtime.h"
#include "mok_core/emulator/emulator.h"
#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_megakernel/cuda/cuda_ranks_test_support.h"

namespace mok::testing {

inline CudaRanksOptions OwnDevices() {
  CudaRanksOptions options;
  options.own_devices = true;
  return options;
}

inline void RunQueued() { ASSERT_EQ(runtime::Synchronize(), OkStatus()); }

inline void ExpectNothingFound(CudaRanks& ranks) {
  for (int rank = 0; rank < ranks.num_ranks(); ++rank) {
    EXPECT_EQ(ranks.Check(rank), MOK_OK) << mok_last_error();
  }
}

inline Tensor RunForward(const LayerData& data, const CudaRanksOptions& options) {
  StartCase({1, 0.1});
  CudaRanks ranks(data, options);
  ranks.QueueAll();
  RunQueued();
  ExpectNothingFound(ranks);
  return ranks.Out();
}

// Forward and backward over memory full of NaN, `passes` times.
inline LayerResult RunBoth(CudaRanks& ranks, int passes = 1) {
  for (int pass = 0; pass < passes; ++pass) {
    ranks.Poison();
    ranks.QueueAll();
    ranks.QueueBackward();
    RunQueued();
  }
  ExpectNothingFound(ranks);
  return ranks.Result();
}
inline LayerResult RunBoth(const LayerData& data, const CudaRanksOptions& options, int passes = 1) {
  StartCase({1, 0.1});
  CudaRanks ranks(data, options);
  return RunBoth(ranks, passes);
}

// The batch of SharedLayer(1) on two ranks and on three, of which some have no tokens or experts,
// on one device and on several.
inline void ForEachPlacement(
    const std::function<void(const LayerData& data, const CudaRanksOptions& options,
                             const std::string& label)>& run) {
  for (const bool on_two : {true, false}) {
    LayerSpec spec = SharedLayer(1);
    spec.tokens = on_two ? std::vector<int64_t>{9, 20} : std::vector<int64_t>{0, 28, 1};
    spec.experts = on_two ? std::vector<int32_t>{3, 1} : std::vector<int32_t>{1, 3, 0};
    const LayerData data(spec);
    for (const bool own_devices : {false, true}) {
      CudaRanksOptions options;
      options.own_devices = own_devices;
      options.id_bytes = own_devices ? 4 : 8;
      run(data, options, StrCat(spec.ep_size(), " ranks, own devices: ", own_devices));
    }
  }
}

// Several row blocks on each of two ranks, and settings that spread it over macrobatches and an SM
// for exchange only.
inline LayerSpec LongSharedLayer() {
  LayerSpec spec = SharedLayer();
  spec.tokens = {150, 151};
  spec.route = [](int64_t token, int k) { return (token / 40 + k) % 4; };
  return spec;
}
inline CudaRanksOptions SpreadOptions() {
  CudaRanksOptions options = OwnDevices();
  options.num_sms = 3;
  options.num_comm_sms = 1;
  options.minibatch_rows = 1;
  options.macrobatch_rows = 200;
  return options;
}

}  // namespace mok::testing
