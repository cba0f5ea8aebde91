// TokenReduce on the device: the weighted sum of a token's routes that ends the forward.
#pragma once

#include "mok_core/device/device.h"
#include "mok_gemm/sm90/swiglu.h"
#include "mok_megakernel/sm90/forward_params.h"

namespace mok {

namespace forward_internal {

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

MOK_DEVICE bool HasRoute(const ForwardParams::Tokens& tokens, int64_t route) {
  return tokens.id_bytes == 8 ? static_cast<const int64_t*>(tokens.expert_ids)[route] >= 0
                              : static_cast<const int32_t*>(tokens.expert_ids)[route] >= 0;
}

// Routes whose rows are loaded together.
inline constexpr int kReduceRoutes = 4;

// Adds the routes of a token in ascending order of k. Rows of missing routes are not read: the
// memory there may hold anything.
MOK_DEVICE void AddRoutes(const ForwardParams& p, int64_t token, int64_t column,
                          ReduceColumns& sum) {
  const int32_t topk = p.shape.topk;
  const int64_t hidden = p.shape.hidden;
  for (int32_t first = 0; first < topk; first += kReduceRoutes) {
    Word4 rows[kReduceRoutes];
    float weights[kReduceRoutes];
    bool valid[kReduceRoutes];
    MOK_UNROLL
    for (int i = 0; i < kReduceRoutes; ++i) {
      const int64_t route = token * topk + first + i;
      valid[i] = first + i < topk && HasRoute(p.tokens, route);
      if (!valid[i]) continue;
      weights[i] = p.tokens.topk_weight[route];
      rows[i] = LoadVectorStreaming(
          reinterpret_cast<const Word4*>(p.tokens.routes + route * hidden + column));
    }
    MOK_UNROLL
    for (int i = 0; i < kReduceRoutes; ++i) {
      if (valid[i]) sum.Add(weights[i], rows[i]);
    }
  }
}

}  // namespace forward_internal

// out[t] = bf16(shared(t) + sum over k of weight[t, k] * row[t, k]) for num_tokens tokens from
// first_token: fp32, shared term first, k ascending, products fused. `thread` of `num_threads`
// threads of the block that call it together.
MOK_DEVICE void ReduceTokens(const ForwardParams& p, int32_t first_token, int32_t num_tokens,
                             int thread, int num_threads) {
  using namespace forward_internal;
  const int32_t vectors = p.shape.hidden / 8;  // of a token
  const int64_t hidden = p.shape.hidden;
  for (int32_t i = thread; i < num_tokens * vectors; i += num_threads) {
    const int32_t in_tile = i / vectors;
    const int64_t token = first_token + in_tile, column = int64_t{i - in_tile * vectors} * 8;
    ReduceColumns sum = {};
    if (p.shape.shared_intermediate > 0) {
      const float scale = p.tokens.has_shared_scale ? p.tokens.shared_scale[token] : 1.0f;
      sum.Add(scale, LoadVectorStreaming(
                         reinterpret_cast<const Word4*>(p.shared.y + token * hidden + column)));
    }
    AddRoutes(p, token, column, sum);
    StoreVector(reinterpret_cast<Word4*>(p.tokens.out + token * hidden + column), sum.Round());
  }
}

}  // namespace mok
