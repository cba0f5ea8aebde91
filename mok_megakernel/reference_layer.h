// Test only: the layer in float64 on one process, written from its formulas and from nothing of the
// engine. One route at a time, no blocking, no reuse.
#pragma once

#include <cstdint>
#include <vector>

namespace mok::testing {

// A whole batch and all experts. Matrices are row-major.
struct ReferenceInputs {
  int64_t num_tokens = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t shared_intermediate = 0;  // 0: no shared expert
  int64_t num_experts = 0;
  int topk = 1;
  double swiglu_limit = 0;  // <= 0: none
  // Rounds g and u as the engine stores them: needed where the clamp makes the gradient jump.
  bool round_to_bf16 = false;

  std::vector<double> x;             // [T, H]
  std::vector<int64_t> topk_idx;     // [T, K], -1: no route
  std::vector<double> topk_weight;   // [T, K]
  std::vector<double> gate;          // [E, I, H]
  std::vector<double> up;            // [E, I, H]
  std::vector<double> down;          // [E, H, I]
  std::vector<double> shared_gate;   // [Is, H]
  std::vector<double> shared_up;     // [Is, H]
  std::vector<double> shared_down;   // [H, Is]
  std::vector<double> shared_scale;  // [T], or empty: 1
  std::vector<double> d_out;         // [T, H]
};

// Shapes as the inputs.
struct ReferenceResult {
  std::vector<double> out;
  std::vector<double> d_x;
  std::vector<double> d_topk_weight;
  std::vector<double> d_shared_scale;
  std::vector<double> d_gate;
  std::vector<double> d_up;
  std::vector<double> d_down;
  std::vector<double> d_shared_gate;
  std::vector<double> d_shared_up;
  std::vector<double> d_shared_down;
};

ReferenceResult RunReference(const ReferenceInputs& inputs);

}  // namespace mok::testing
