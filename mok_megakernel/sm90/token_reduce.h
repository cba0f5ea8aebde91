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

  MOK_DEVICE bool HasRoute(int64_t route) const { return SignOfRoute(route) >= 0; }
  // The word of the expert id that holds its sign (the upper one of eight bytes).
  MOK_DEVICE int32_t SignOfRoute(int64_t route) const {
    const auto* words = static_cast<const int32_t*>(expert_ids);
    return id_bytes == 8 ? words[2 * route + 1] : words[route];
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

inline constexpr int kLanes = 32;
// A warp sums kReduceVectors vectors of 8 columns per lane, and loads those of kReduceRoutes routes
// and of the shared expert before it adds the first.
inline constexpr int kReduceVectors = 4;
inline constexpr int kReduceRoutes = 4;

// A lane's part of a row: vectors first, first + kLanes, ... below `count`.
struct LaneVectors {
  int32_t first, count;

  MOK_DEVICE bool Has(int i) const { return first + i * kLanes < count; }
  MOK_DEVICE void Load(const BFloat16* row, Word4 (&vectors)[kReduceVectors]) const {
    MOK_UNROLL
    for (int i = 0; i < kReduceVectors; ++i) {
      if (!Has(i)) continue;
      vectors[i] = LoadVectorStreaming(reinterpret_cast<const Word4*>(row) + first + i * kLanes);
    }
  }
  MOK_DEVICE void Add(float weight, const Word4 (&vectors)[kReduceVectors],
                      ReduceColumns (&sum)[kReduceVectors]) const {
    MOK_UNROLL
    for (int i = 0; i < kReduceVectors; ++i) {
      if (Has(i)) sum[i].Add(weight, vectors[i]);
    }
  }
  MOK_DEVICE void Store(const ReduceColumns (&sum)[kReduceVectors], BFloat16* row) const {
    MOK_UNROLL
    for (int i = 0; i < kReduceVectors; ++i) {
      if (!Has(i)) continue;
      StoreVector(reinterpret_cast<Word4*>(row) + first + i * kLanes, sum[i].Round());
    }
  }
};

// What lane l knows of route l of up to 32 routes of the warp's token.
struct LaneRoute {
  float weight;
  uint32_t valid;  // bit l: of all lanes

  MOK_DEVICE LaneRoute(const TokenReduction& from, int64_t token, int32_t first) {
    const int32_t k = first + static_cast<int32_t>(ThreadIndexReadHere()) % kLanes;
    const int64_t route = token * from.topk + k;
    const bool is_valid = k < from.topk && from.HasRoute(route);
    weight = is_valid && from.is_weighted ? from.route_weight[route] : 1.0f;
    valid = Ballot(is_valid);
  }
};

// Rows of kReduceRoutes routes. Those of missing routes are not read: the memory there may hold
// anything.
struct RouteBatch {
  Word4 vectors[kReduceRoutes][kReduceVectors];

  MOK_DEVICE void Load(const BFloat16* rows, int64_t hidden, uint32_t valid,
                       const LaneVectors& part) {
    MOK_UNROLL
    for (int i = 0; i < kReduceRoutes; ++i) {
      if (valid >> i & 1u) part.Load(rows + i * hidden, vectors[i]);
    }
  }
  // first: of the batch among the lanes' routes.
  MOK_DEVICE void Add(const LaneRoute& route, int first, const LaneVectors& part,
                      ReduceColumns (&sum)[kReduceVectors]) const {
    MOK_UNROLL
    for (int i = 0; i < kReduceRoutes; ++i) {
      const float weight = Shuffle(route.weight, first + i);
      if (route.valid >> (first + i) & 1u) part.Add(weight, vectors[i], sum);
    }
  }
};

// One token by one warp: first the shared term, then the routes in ascending order of k.
MOK_DEVICE void ReduceToken(const TokenReduction& from, int64_t token) {
  static_assert(kLanes % kReduceRoutes == 0);
  const int64_t hidden = from.hidden;
  const BFloat16* rows = from.routes + token * from.topk * hidden;
  const int32_t lane = static_cast<int32_t>(ThreadIndexReadHere()) % kLanes;
  const int32_t count = from.hidden / 8;
  const LaneRoute first_routes(from, token, 0);
  const float scale = from.has_shared_scale ? from.shared_scale[token] : 1.0f;
  MOK_NO_UNROLL
  for (int32_t first = 0; first < count; first += kLanes * kReduceVectors) {
    const LaneVectors part = {first + lane, count};
    ReduceColumns sum[kReduceVectors] = {};
    Word4 shared[kReduceVectors];
    if (from.has_shared) part.Load(from.shared + token * hidden, shared);
    MOK_NO_UNROLL
    for (int32_t k = 0; k < from.topk; k += kReduceRoutes) {
      const int in_lanes = k % kLanes;
      const LaneRoute route = k < kLanes ? first_routes : LaneRoute(from, token, k - in_lanes);
      RouteBatch batch;
      batch.Load(rows + k * hidden, hidden, route.valid >> in_lanes, part);
      if (k == 0 && from.has_shared) part.Add(scale, shared, sum);
      batch.Add(route, in_lanes, part, sum);
    }
    part.Store(sum, from.out + token * hidden);
  }
}

}  // namespace pass_internal

// out[t] = bf16(shared(t) + sum over k of weight[t, k] * row[t, k]) for the tokens: fp32, shared
// term first, k ascending, products fused. `thread` of `num_threads` threads, whole warps of the
// block that call it together.
MOK_DEVICE void ReduceTokens(const TokenReduction& from, const TokenRange& tokens, int thread,
                             int num_threads) {
  using namespace pass_internal;
  for (int32_t i = thread / kLanes; i < tokens.count; i += num_threads / kLanes) {
    ReduceToken(from, tokens.first + i);
  }
}

}  // namespace mok
