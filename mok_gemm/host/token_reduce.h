// TokenReduce: the sum over a token's routes that ends each pass.
#ifndef MOK_GEMM_HOST_TOKEN_REDUCE_H_
#define MOK_GEMM_HOST_TOKEN_REDUCE_H_

#include <cstdint>

#include "mok_core/dtype.h"
#include "mok_gemm/host/isa.h"

namespace mok {

// out[t] = round(shared[t] * shared_scale[t] + sum over k ascending of weights[t, k] * y[t * topk +
// k]), in fp32, rounded once to `dtype`. Forward: y are the combined expert outputs. Backward: y
// are the routed dx rows, weights and shared_scale null. All pointers are at the first token.
struct TokenReduceTile {
  int64_t tokens = 0;            // >= 0
  int64_t hidden = 0;            // H
  int topk = 0;                  // K, >= 0
  DType dtype = DType::kBf16;    // of shared, y and out: kBf16 or kFp32
  const void* shared = nullptr;  // [tokens, hidden], or null: the sum starts at zero
  int64_t shared_stride = 0;
  const float* shared_scale = nullptr;  // [tokens], or null: one
  const void* y = nullptr;              // [tokens * topk, hidden]
  int64_t y_stride = 0;
  const int32_t* expert_ids = nullptr;  // [tokens, topk]; -1: no route, its row is never read
  const float* weights = nullptr;       // [tokens, topk], or null: one
  void* out = nullptr;                  // [tokens, hidden], may alias shared
  int64_t out_stride = 0;
};

// Thread-safe. `isa` must be supported. With -1 for every route and no shared term out is zero.
// The bits of an element depend on its token's data and the ISA only (products are fused except on
// kPortable).
void TokenReduce(Isa isa, const TokenReduceTile& tile);

}  // namespace mok

#endif  // MOK_GEMM_HOST_TOKEN_REDUCE_H_
