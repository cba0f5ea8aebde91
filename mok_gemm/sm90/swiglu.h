// SwiGLU on the device. The bits of h are defined here: whoever recomputes it uses these functions.
#pragma once

#include "mok_core/device/device.h"

namespace mok {

// 1 / (1 + e^-g).
MOK_DEVICE float Sigmoid(float g) {
  return Reciprocal(1.0f + ExponentialBase2(Multiply(g, -1.4426950408889634f)));
}

// g * sigmoid(g), within 1e-6 of the exact value relative to its size, but to no less than 1e-36.
// +inf gives +inf, -inf and NaN give NaN (as PyTorch and the host worker).
MOK_DEVICE float Silu(float g) { return Multiply(g, Sigmoid(g)); }

// min(value, limit) and clip(value, -limit, limit); a NaN stays a NaN.
MOK_DEVICE float ClampAbove(float value, float limit) { return MinimumOrNan(value, limit); }
MOK_DEVICE float ClampBoth(float value, float limit) {
  return MaximumOrNan(ClampAbove(value, limit), -limit);
}

// The low and high bf16 of a word.
MOK_DEVICE float LowBFloat16(uint32_t word) { return BitsToFloat(word << 16); }
MOK_DEVICE float HighBFloat16(uint32_t word) { return BitsToFloat(word & 0xFFFF0000u); }

// h of one element from the rounded g and u, in fp32. limit: +infinity for no clamp.
MOK_DEVICE float SwiGlu(float g, float u, float limit) {
  return Multiply(Silu(ClampAbove(g, limit)), ClampBoth(u, limit));
}

// h of two packed elements.
MOK_DEVICE uint32_t SwiGluPacked(uint32_t gate, uint32_t up, float limit) {
  return PackBFloat16(SwiGlu(LowBFloat16(gate), LowBFloat16(up), limit),
                      SwiGlu(HighBFloat16(gate), HighBFloat16(up), limit));
}

// h (the bits of SwiGlu) and the gradients of one element; d_hidden includes the row's weight. A
// gradient is zero where the clamp is active (a value equal to the limit is not clamped:
// torch.clamp's convention); a NaN stays a NaN.
struct SwiGluGradient {
  float hidden, d_gate, d_up;
};
MOK_DEVICE SwiGluGradient SwiGluBackward(float g, float u, float d_hidden, float limit) {
  const float gate = ClampAbove(g, limit), up = ClampBoth(u, limit);
  const float sigmoid = Sigmoid(gate), silu = Multiply(gate, sigmoid);
  const float derivative = MultiplyAdd(silu, 1.0f - sigmoid, sigmoid);  // of silu
  const float d_gate = Multiply(Multiply(d_hidden, up), derivative);
  const float d_up = Multiply(d_hidden, silu);
  return {Multiply(silu, up), g > limit ? 0.0f : d_gate, __builtin_fabsf(u) > limit ? 0.0f : d_up};
}

}  // namespace mok
