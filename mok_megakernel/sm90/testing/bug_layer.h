// Test only: the layer of the tests that plant mistakes, and how it runs. Small, with everything in
// it that a mistake can spoil.
#pragma once

#include "mok_megakernel/layer_test_support.h"
#include "mok_megakernel/sm90/testing/device_layer.h"
#include "mok_megakernel/sm90/testing/small_layer.h"

namespace mok::testing {

// Two ranks whose rings are used several times, a shared expert, and a last token block that is not
// full.
inline LayerSpec BugLayer() {
  LayerSpec spec = LongLayer();
  spec.tokens = {40, 90};  // the second warpgroup has rows as well
  spec.topk = 2;
  spec.shared_intermediate = 8;
  return spec;
}

inline DeviceLayerOptions BugOptions() {
  DeviceLayerOptions options = WithRing(1, 1);
  options.exchange_tiles = 8;
  options.chunk_bytes = 32;  // a row is three chunks, the last one short
  return options;
}

// Mistakes in passes of schedules that were lost, which a test of the forward's looks at.
inline bool IsOfALostSchedule(int bug) {
  return bug >= static_cast<int>(PassBug::kLostMeets) &&
         bug <= static_cast<int>(PassBug::kLostNotTold);
}

}  // namespace mok::testing
