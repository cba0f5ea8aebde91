// Layers of real models in the sizes of the benchmarks, filled fast, with a float64 reference of
// sampled tokens.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mok_megakernel/layer_test_support.h"

namespace mok::testing {

struct ModelShape {
  const char* name;
  int64_t hidden, intermediate;
  int topk, local_experts;
};
// kimi-k2.7, glm-5.2, qwen3.5-397b, deepseek-v4-pro with the local experts of EP 64.
extern const std::vector<ModelShape> kModelShapes;

// The model's layer: 2,048 tokens per rank, its top-k, a shared expert as wide as the routed ones.
LayerSpec ModelLayerSpec(const ModelShape& shape, int ep_size);
// The link load of EP 64: one route for each of 2,048 * K tokens per rank, 63 of 64 of them to
// another rank, a shared expert of width 256.
LayerSpec TrafficLayerSpec(const ModelShape& shape, int ep_size);

// LayerData of any size on all cores; values of about unit variance (weights: 1 / columns).
LayerData MakeLargeLayer(const LayerSpec& spec);

// Rows `tokens` of out in float64, [tokens, H].
std::vector<double> ReferenceRows(const LayerData& data, const std::vector<int64_t>& tokens);

// The same rows of the gradients, of layers without clamp.
struct GradientRows {
  std::vector<double> d_x;            // [tokens, H]
  std::vector<double> d_topk_weight;  // [tokens, K]
};
GradientRows ReferenceGradientRows(const LayerData& data, const std::vector<int64_t>& tokens);

// `count` tokens spread over [0, num_tokens), with the first and the last.
std::vector<int64_t> SampleTokens(int64_t num_tokens, int64_t count);

// Bytes that cross the busiest link direction in a forward (dispatch and combine both count).
double BusiestLinkBytes(const LayerData& data);

}  // namespace mok::testing
