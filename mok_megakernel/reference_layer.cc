#include "mok_megakernel/reference_layer.h"

#include <algorithm>
#include <cmath>

#include "mok_core/dtype.h"

namespace mok::testing {
namespace {

double Store(double value, bool round_to_bf16) {
  return round_to_bf16 ? ToFloat(RoundToBFloat16(static_cast<float>(value))) : value;
}

// One expert's weights and gradients, at their first elements.
struct Expert {
  int64_t intermediate;
  const double* gate;
  const double* up;
  const double* down;
  double* d_gate;
  double* d_up;
  double* d_down;
};

// Adds weight * expert(x) to out, and all gradients that <d_out, weight * expert(x)> has; returns
// the one of the weight.
double AddRoute(const ReferenceInputs& inputs, const Expert& expert, int64_t token, double weight,
                ReferenceResult* result) {
  const int64_t hidden = inputs.hidden;
  const double* x = inputs.x.data() + token * hidden;
  const double* d_out = inputs.d_out.data() + token * hidden;
  double* out = result->out.data() + token * hidden;
  double* d_x = result->d_x.data() + token * hidden;
  double d_weight = 0;
  for (int64_t i = 0; i < expert.intermediate; ++i) {
    const double* gate_row = expert.gate + i * hidden;
    const double* up_row = expert.up + i * hidden;
    double g = 0;
    double u = 0;
    double d_h = 0;  // without the weight
    for (int64_t j = 0; j < hidden; ++j) {
      g += x[j] * gate_row[j];
      u += x[j] * up_row[j];
      d_h += d_out[j] * expert.down[j * expert.intermediate + i];
    }
    g = Store(g, inputs.round_to_bf16);
    u = Store(u, inputs.round_to_bf16);
    const double limit = inputs.swiglu_limit > 0 ? inputs.swiglu_limit : INFINITY;
    const double clamped_g = std::min(g, limit);
    const double clamped_u = std::clamp(u, -limit, limit);
    const double sigmoid = 1 / (1 + std::exp(-clamped_g));
    const double silu = clamped_g * sigmoid;
    const double h = silu * clamped_u;
    d_weight += d_h * h;
    const double d_silu = sigmoid * (1 + clamped_g * (1 - sigmoid));
    const double d_g = g > limit ? 0 : weight * d_h * clamped_u * d_silu;
    const double d_u = std::abs(u) > limit ? 0 : weight * d_h * silu;
    for (int64_t j = 0; j < hidden; ++j) {
      out[j] += weight * h * expert.down[j * expert.intermediate + i];
      d_x[j] += d_g * gate_row[j] + d_u * up_row[j];
      expert.d_gate[i * hidden + j] += d_g * x[j];
      expert.d_up[i * hidden + j] += d_u * x[j];
      expert.d_down[j * expert.intermediate + i] += d_out[j] * weight * h;
    }
  }
  return d_weight;
}

}  // namespace

ReferenceResult RunReference(const ReferenceInputs& inputs) {
  ReferenceResult result;
  result.out.resize(inputs.x.size());
  result.d_x.resize(inputs.x.size());
  result.d_topk_weight.resize(inputs.topk_idx.size());
  result.d_shared_scale.resize(inputs.shared_scale.size());
  result.d_gate.resize(inputs.gate.size());
  result.d_up.resize(inputs.up.size());
  result.d_down.resize(inputs.down.size());
  result.d_shared_gate.resize(inputs.shared_gate.size());
  result.d_shared_up.resize(inputs.shared_up.size());
  result.d_shared_down.resize(inputs.shared_down.size());
  const int64_t expert_size = inputs.intermediate * inputs.hidden;
  const Expert shared = {inputs.shared_intermediate,  inputs.shared_gate.data(),
                         inputs.shared_up.data(),     inputs.shared_down.data(),
                         result.d_shared_gate.data(), result.d_shared_up.data(),
                         result.d_shared_down.data()};
  for (int64_t token = 0; token < inputs.num_tokens; ++token) {
    if (inputs.shared_intermediate > 0) {
      const bool scaled = !inputs.shared_scale.empty();
      const double scale = scaled ? inputs.shared_scale[static_cast<size_t>(token)] : 1;
      const double d_scale = AddRoute(inputs, shared, token, scale, &result);
      if (scaled) result.d_shared_scale[static_cast<size_t>(token)] = d_scale;
    }
    for (int64_t route = token * inputs.topk; route < (token + 1) * inputs.topk; ++route) {
      const int64_t id = inputs.topk_idx[static_cast<size_t>(route)];
      if (id < 0) continue;
      const int64_t offset = id * expert_size;
      const Expert expert = {inputs.intermediate,           inputs.gate.data() + offset,
                             inputs.up.data() + offset,     inputs.down.data() + offset,
                             result.d_gate.data() + offset, result.d_up.data() + offset,
                             result.d_down.data() + offset};
      result.d_topk_weight[static_cast<size_t>(route)] =
          AddRoute(inputs, expert, token, inputs.topk_weight[static_cast<size_t>(route)], &result);
    }
  }
  return result;
}

}  // namespace mok::testing
