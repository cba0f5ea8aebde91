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

inline constexpr int kLanes = 32;
// A warp sums kVectors vectors of 8 columns per lane at a time, and loads those of kRoutes routes,
// beside the shared expert's, before it adds the first: 20 loads on their way for tokens with many
// routes, 12 and a next shared term for those with few.
struct ReduceManyRoutes {
  static constexpr int kVectors = 4, kRoutes = 4;
};
struct ReduceFewRoutes {
  static constexpr int kVectors = 6, kRoutes = 1;
};

// A lane's part of a row: vectors first, first + kLanes, ... below `count`.
template <class Shape>
struct LaneVectors {
  int32_t first, count;
  using Vectors = Word4[Shape::kVectors];
  using Sums = ReduceColumns[Shape::kVectors];

  MOK_DEVICE bool Has(int i) const { return first + i * kLanes < count; }
  MOK_DEVICE void Load(const BFloat16* row, Vectors& vectors) const {
    MOK_UNROLL
    for (int i = 0; i < Shape::kVectors; ++i) {
      if (!Has(i)) continue;
      vectors[i] = LoadVectorStreaming(reinterpret_cast<const Word4*>(row) + first + i * kLanes);
    }
  }
  MOK_DEVICE void Add(float weight, const Vectors& vectors, Sums& sum) const {
    MOK_UNROLL
    for (int i = 0; i < Shape::kVectors; ++i) {
      if (Has(i)) sum[i].Add(weight, vectors[i]);
    }
  }
  MOK_DEVICE void Store(const Sums& sum, BFloat16* row) const {
    MOK_UNROLL
    for (int i = 0; i < Shape::kVectors; ++i) {
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
    const int32_t k = first + static_cast<int32_t>(ThreadIndex().x) % kLanes;
    const int64_t route = token * from.topk + k;
    const bool is_valid = k < from.topk && from.HasRoute(route);
    weight = is_valid && from.is_weighted ? from.route_weight[route] : 1.0f;
    valid = Ballot(is_valid);
  }
};

// Rows of kRoutes routes. Those of missing routes are not read: the memory there may hold anything.
template <class Shape>
struct RouteBatch {
  using Part = LaneVectors<Shape>;
  typename Part::Vectors vectors[Shape::kRoutes];

  MOK_DEVICE void Load(const BFloat16* rows, int64_t hidden, uint32_t valid, const Part& part) {
    MOK_UNROLL
    for (int i = 0; i < Shape::kRoutes; ++i) {
      if (valid >> i & 1u) part.Load(rows + i * hidden, vectors[i]);
    }
  }
  // first: of the batch among the lanes' routes.
  MOK_DEVICE void Add(const LaneRoute& route, int first, const Part& part,
                      typename Part::Sums& sum) const {
    MOK_UNROLL
    for (int i = 0; i < Shape::kRoutes; ++i) {
      const float weight = Shuffle(route.weight, first + i);
      if (route.valid >> (first + i) & 1u) part.Add(weight, vectors[i], sum);
    }
  }
};

// One token by one warp: first the shared term, then the routes in ascending order of k.
template <class Shape>
MOK_DEVICE void ReduceToken(const TokenReduction& from, int64_t token) {
  static_assert(kLanes % Shape::kRoutes == 0);
  constexpr int32_t kStep = kLanes * Shape::kVectors;
  const int64_t hidden = from.hidden;
  const BFloat16* rows = from.routes + token * from.topk * hidden;
  const BFloat16* shared_row = from.shared + token * hidden;
  const int32_t lane = static_cast<int32_t>(ThreadIndex().x) % kLanes, count = from.hidden / 8;
  // The shared term of the first columns is on its way while the routes are looked up, that of the
  // next ones while the routes of these are added.
  typename LaneVectors<Shape>::Vectors shared;
  LaneVectors<Shape> part = {lane, count};
  if (from.has_shared) part.Load(shared_row, shared);
  const float scale = from.has_shared_scale ? from.shared_scale[token] : 1.0f;
  const LaneRoute first_routes(from, token, 0);
  MOK_NO_UNROLL
  for (; part.first - lane < count; part.first += kStep) {
    typename LaneVectors<Shape>::Sums sum = {};
    MOK_NO_UNROLL
    for (int32_t k = 0; k < from.topk; k += Shape::kRoutes) {
      const int in_lanes = k % kLanes;
      const LaneRoute route = k < kLanes ? first_routes : LaneRoute(from, token, k - in_lanes);
      RouteBatch<Shape> batch;
      batch.Load(rows + k * hidden, hidden, route.valid >> in_lanes, part);
      if (k == 0 && from.has_shared) {
        part.Add(scale, shared, sum);
        LaneVectors<Shape>{part.first + kStep, count}.Load(shared_row, shared);
      }
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
    if (from.topk <= 2) {
      ReduceToken<ReduceFewRoutes>(from, tokens.first + i);
    } else {
      ReduceToken<ReduceManyRoutes>(from, tokens.first + i);
    }
  }
}

}  // namespace mok
