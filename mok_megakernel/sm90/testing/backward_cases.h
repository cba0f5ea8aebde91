// Test only: small layers and how their backward runs in the emulator, after the forward.
#pragma once

#include <gtest/gtest.h>

#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_megakernel/sm90/backward_test_kernels.h"
#include "mok_megakernel/sm90/forward_test_kernels.h"
#include "mok_megakernel/sm90/testing/device_backward.h"
#include "mok_megakernel/sm90/testing/device_layer.h"
#include "mok_megakernel/sm90/testing/small_layer.h"

namespace mok::testing {

struct BackwardCase {
  DeviceLayerOptions layer;
  DeviceBackwardOptions backward;
};

inline BackwardCase TwoBlocks() {
  BackwardCase options;
  options.layer = LayerOnTwoBlocks();
  return options;
}

// Forward, then backward. poison: NaN in everything that the backward has to write.
inline LayerResult RunBackward(const LayerData& data, const BackwardCase& options,
                               const Interleaving& interleaving = {0, 0.1}, bool poison = false) {
  StartCase(interleaving);
  DeviceLayer layer(data, options.layer, SmallForwardKernel);
  DeviceBackward backward(layer, options.backward, SmallBackwardKernel);
  EXPECT_EQ(layer.LaunchAll(), OkStatus());
  if (poison) {
    RunQueued();
    backward.Poison();
  }
  EXPECT_EQ(backward.LaunchAll(), OkStatus());
  RunQueued();
  EXPECT_EQ(layer.CheckRecords(), OkStatus());
  EXPECT_EQ(backward.CheckRecords(), OkStatus());
  return backward.Result();
}

}  // namespace mok::testing
