// TokenReduce on the device: the sum of a token's rows that ends a pass.
#pragma once

#include "mok_core/device/device.h"
#include "mok_core/dtype.h"
#include "mok_gemm/sm90/swiglu.h"
#include "mok_megakernel/sm90/pass_work.h"

namespace mok {

// What is summed; T, K, H as in the pass's parameters.
struct TokenReduction {
  const void* expert_ids;     // [T, K] of id_bytes each; -1: no route
  const BFloat16* routes;     // [T * K, H]
  const float* route_weight;  // [T, K]; is_weighted: else not read, and 1
  const BFloat16* shared;     // [T, H]; has_shared: else not read
  const float* shared_scale;  // [T]; has_shared_scale: else not read, and 1
  BFloat16* out;              // [T, H]
  int32_t hidden, topk;
  int32_t id_bytes;  // 4 or 8
  bool is_weighted, has_shared, has_shared_scale;

  MOK_DEVICE bool HasRoute(int64_t route) const {
    return id_bytes == 8 ? static_cast<const int64_t*>(expert_ids)[route] >= 0
                         : static_cast<const int32_t*>(expert_ids)[route] >= 0;
  }
};

namespace pass_internal {

// Eight adjacent columns of one token, fp32.
struct ReduceColumns {
  float value[8];

  MOK_DEVICE void Add(float weight, Word4 packed) {
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
    MOK_UNROLL
    for (int i = 0; i < 4; ++i) {
      value[2 * i] = MultiplyAdd(weight, LowBFloat16(words[i]), value[2 * i]);
      value[2 * i + 1] = MultiplyAdd(weight, HighBFloat16(words[i]), value[2 * i + 1]);
    }
  }
  MOK_DEVICE Word4 Round() const {
    return {PackBFloat16(value[0], value[1]), PackBFloat16(value[2], value[3]),
            PackBFloat16(value[4], value[5]), PackBFloat16(value[6], value[7])};
  }
};

// Routes whose rows are loaded together.
inline constexpr int kReduceRoutes = 4;

// Adds the routes of a token in ascending order of k. Rows of missing routes are not read: the
// memory there may hold anything.
MOK_DEVICE void AddRoutes(const TokenReduction& from, int64_t token, int64_t column,
                          ReduceColumns& sum) {
  const int32_t topk = from.topk;
  const int64_t hidden = from.hidden;
  for (int32_t first = 0; first < topk; first += kReduceRoutes) {
    Word4 rows[kReduceRoutes];
    float weights[kReduceRoutes];
    bool valid[kReduceRoutes];
    MOK_UNROLL
    for (int i = 0; i < kReduceRoutes; ++i) {
      const int64_t route = token * topk + first + i;
      valid[i] = first + i < topk && from.HasRoute(route);
      if (!valid[i]) continue;
      weights[i] = from.is_weighted ? from.route_weight[route] : 1.0f;
      rows[i] = LoadVectorStreaming(
          reinterpret_cast<const Word4*>(from.routes + route * hidden + column));
    }
    MOK_UNROLL
    for (int i = 0; i < kReduceRoutes; ++i) {
      if (valid[i]) sum.Add(weights[i], rows[i]);
    }
  }
}

}  // namespace pass_internal

// out[t] = bf16(shared(t) + sum over k of weight[t, k] * row[t, k]) for the tokens: fp32, shared
// term first, k ascending, products fused. `thread` of `num_threads` threads of the block that call
// it together.
MOK_DEVICE void ReduceTokens(const TokenReduction& from, const TokenRange& tokens, int thread,
                             int num_threads) {
  using namespace pass_internal;
  const int32_t vectors = from.hidden / 8;  // of a token
  const int64_t hidden = from.hidden;
  for (int32_t i = thread; i < tokens.count * vectors; i += num_threads) {
    const int32_t in_tile = i / vectors;
    const int64_t token = tokens.first + in_tile, column = int64_t{i - in_tile * vectors} * 8;
    ReduceColumns sum = {};
    if (from.has_shared) {
      const float scale = from.has_shared_scale ? from.shared_scale[token] : 1.0f;
      sum.Add(scale, LoadVectorStreaming(
                         reinterpret_cast<const Word4*>(from.shared + token * hidden + column)));
    }
    AddRoutes(from, token, column, sum);
    StoreVector(reinterpret_cast<Word4*>(from.out + token * hidden + column), sum.Round());
  }
}

}  // namespace mok
