// Test only: layers of the tests of both passes, and how they run in the emulator.
#pragma once

#include "mok_megakernel/sm90/testing/device_layer.h"

namespace mok::testing {

inline LayerSpec SmallLayer() {
  LayerSpec spec;
  spec.tokens = {9, 20};
  spec.experts = {2, 2};
  spec.topk = 2;
  spec.hidden = 72;
  spec.intermediate = 40;
  return spec;
}

// Several macrobatches, experts that cross them, slots of the ring that are used again.
inline LayerSpec LongLayer() {
  LayerSpec spec = SmallLayer();
  spec.tokens = {70, 90};
  spec.experts = {2, 3};
  spec.topk = 3;
  spec.hidden = 40;
  spec.intermediate = 24;
  return spec;
}

inline DeviceLayerOptions LayerOnTwoBlocks() {
  DeviceLayerOptions options;
  options.forward.num_sms = 2;
  options.exchange_tiles = 4;
  options.token_reduce_tiles = 8;
  return options;
}

}  // namespace mok::testing
