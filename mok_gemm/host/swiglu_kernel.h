// SwiGLU epilogues. Include only from kernels_<isa>.cc, after the ISA's Simd.
//
// Accuracy, tested over every bf16 gate value: silu(g) and its derivative are within 4e-7 of the
// exact value, relative to the latter's size, but to no less than 1e-36, where fp32 runs out of
// exponents, and for the derivative above g = -2 to no less than 0.1, because it is zero at
// g = -1.278. Infinite g, when no clamp makes it finite, gives silu(inf) = inf, silu(-inf) = NaN
// and a NaN derivative, and NaN gives NaN: the same as PyTorch, and a diverged layer stays visible.
#pragma once

#include <cstdint>

#include "mok_gemm/host/kernel_table.h"
#include "mok_gemm/host/store_kernel.h"

namespace mok {

// silu(g) = g * sigmoid(g) and its derivative.
template <class Simd>
struct Silu {
  using Float = typename Simd::Float;

  Float value;
  Float derivative;

  explicit Silu(Float g) {
    // exp of a non-positive number cannot overflow, and with e = exp(-|g|) neither sigmoid(g) nor
    // 1 - sigmoid(g) suffers cancellation: they are 1 / (1 + e) and e / (1 + e) in this order for
    // g >= 0, in the other order for g < 0.
    const Float exponential = ExpOfNonPositive(Simd::NegativeAbs(g));
    const Float large = Simd::Divide(Simd::Set(1.0f), Simd::Add(Simd::Set(1.0f), exponential));
    const Float small = Simd::Multiply(exponential, large);
    const Float sigmoid = Simd::SelectGreater(Simd::Zero(), g, small, large);
    const Float complement = Simd::SelectGreater(Simd::Zero(), g, large, small);
    value = Simd::Multiply(g, sigmoid);
    derivative = Simd::MultiplyAdd(value, complement, sigmoid);
  }

 private:
  // exp(x) for x <= 0, gradually down to the smallest denormal; a NaN stays a NaN.
  static Float ExpOfNonPositive(Float x) {
    // exp(-104) is below half of the smallest denormal.
    x = Simd::Max(Simd::Set(-104.0f), x);
    // x = n ln 2 + r with |r| <= ln 2 / 2. ln 2 is taken as a 10-bit head, whose product with n is
    // exact, and a tail (W. J. Cody and W. Waite, Software Manual for the Elementary Functions).
    const Float n = Simd::Nearest(Simd::Multiply(x, Simd::Set(1.44269504f)));
    Float r = Simd::MultiplyAdd(n, Simd::Set(-0.693359375f), x);
    r = Simd::MultiplyAdd(n, Simd::Set(2.12194440e-4f), r);
    // The Taylor series; its first dropped term, r^8 / 8!, is below 6e-9. The terms are paired so
    // that the additions form a tree: the epilogue waits for results, not for execution units.
    const auto linear = [r](float low, float high) {
      return Simd::MultiplyAdd(r, Simd::Set(high), Simd::Set(low));
    };
    const Float r2 = Simd::Multiply(r, r);
    const Float low = Simd::MultiplyAdd(r2, linear(1.0f / 2, 1.0f / 6), linear(1.0f, 1.0f));
    const Float high =
        Simd::MultiplyAdd(r2, linear(1.0f / 720, 1.0f / 5040), linear(1.0f / 24, 1.0f / 120));
    const Float p = Simd::MultiplyAdd(Simd::Multiply(r2, r2), high, low);
    // n may be as low as -150: 2^n as the product of two normal powers.
    const Float half = Simd::Nearest(Simd::Multiply(n, Simd::Set(0.5f)));
    const Float rest = Simd::MultiplyAdd(half, Simd::Set(-1.0f), n);
    return Simd::Multiply(Simd::Multiply(p, Simd::PowerOfTwo(half)), Simd::PowerOfTwo(rest));
  }
};

template <class Simd, class Units>
struct SwigluKernel {
  using Element = typename Units::Element;
  using Float = typename Simd::Float;
  static constexpr int kLanes = Simd::kLanes;

  // KernelTable::swiglu_forward.
  static void Forward(const GateUpTile& tile, const GateUpAccumulators& acc) {
    constexpr int kStripColumns = StoreKernel<Simd>::kStripColumns;
    for (int row = 0; row < tile.rows; row += kLanes) {
      const int rows = tile.rows - row < kLanes ? tile.rows - row : kLanes;
      for (int column = 0; column < tile.columns; column += kStripColumns) {
        const int left = tile.columns - column;
        ForwardStrip(tile, acc, {row, column, left < kStripColumns ? left : kStripColumns}, rows);
      }
    }
  }

  // KernelTable::swiglu_backward.
  static void Backward(const DownGradTile& tile, const DownGradAccumulators& acc) {
    for (int row = 0; row < tile.rows; ++row) {
      Float partial = Simd::Zero();
      for (int column = 0; column < tile.columns; column += kLanes) {
        const int n = tile.columns - column < kLanes ? tile.columns - column : kLanes;
        partial = BackwardVector(tile, acc, {row, column, n}, partial);
      }
      tile.d_router_partial[row * tile.d_router_stride] = Simd::Sum(partial);
    }
  }

 private:
  // g and u after the clamp, with the gradient factors that the clamp leaves.
  struct Clamped {
    Float gate, up;

    Clamped(Float g, Float u, float limit)
        : gate(Simd::Min(Simd::Set(limit), g)),
          up(Simd::Max(Simd::Set(-limit), Simd::Min(Simd::Set(limit), u))) {}
  };

  // n columns of a row.
  struct Position {
    int row, column, n;
  };

  // Up to kLanes rows of a strip of at.n columns, by way of the L1 cache where they are transposed.
  static void ForwardStrip(const GateUpTile& tile, const GateUpAccumulators& acc,
                           const Position& at, int rows) {
    using Store = StoreKernel<Simd>;
    alignas(64) float upright_gate[kLanes * Store::kStripColumns];
    alignas(64) float upright_up[kLanes * Store::kStripColumns];
    const float* gate = acc.gate + at.row * acc.stride + at.column;
    const float* up = acc.up + at.row * acc.stride + at.column;
    int64_t stride = acc.stride;
    if (acc.transposed) {
      const int64_t from = at.column * acc.stride + at.row;
      Store::TransposeStrip(acc.gate + from, acc.stride, at.n, upright_gate);
      Store::TransposeStrip(acc.up + from, acc.stride, at.n, upright_up);
      gate = upright_gate;
      up = upright_up;
      stride = Store::kStripColumns;
    }
    for (int i = 0; i < rows; ++i) {
      const int64_t out = (at.row + i) * tile.out_stride + at.column;
      ForwardRow(tile, out, gate + i * stride, up + i * stride, at.n);
    }
  }

  // `columns` elements at offset `out` of the outputs.
  static void ForwardRow(const GateUpTile& tile, int64_t out, const float* gates, const float* ups,
                         int columns) {
    auto* const gate_out = static_cast<Element*>(tile.gate) + out;
    auto* const up_out = static_cast<Element*>(tile.up) + out;
    auto* const hidden_out = static_cast<Element*>(tile.activation) + out;
    if constexpr (Units::kSumsAreNormal) {
      if (columns == 2 * kLanes) {
        Float gate[2] = {Simd::LoadAll(gates), Simd::LoadAll(gates + kLanes)};
        Float up[2] = {Simd::LoadAll(ups), Simd::LoadAll(ups + kLanes)};
        Simd::RoundAndStoreNormalPair(gate_out, gate);
        Simd::RoundAndStoreNormalPair(up_out, up);
        Simd::StorePair(hidden_out, Hidden(gate[0], up[0], tile.swiglu_limit),
                        Hidden(gate[1], up[1], tile.swiglu_limit));
        return;
      }
    }
    for (int column = 0; column < columns; column += kLanes) {
      const int n = columns - column < kLanes ? columns - column : kLanes;
      const Float gate = Round(Simd::Load(gates + column, n));
      const Float up = Round(Simd::Load(ups + column, n));
      Simd::Store(gate_out + column, gate, n);
      Simd::Store(up_out + column, up, n);
      Simd::Store(hidden_out + column, Hidden(gate, up, tile.swiglu_limit), n);
    }
  }

  static Float Hidden(Float gate, Float up, float limit) {
    const Clamped clamped(gate, up, limit);
    return Simd::Multiply(Silu<Simd>(clamped.gate).value, clamped.up);
  }

  static Float Round(Float x) {
    if constexpr (sizeof(Element) == sizeof(BFloat16)) return Simd::RoundToBf16(x);
    return x;
  }

  // Lanes beyond n load as zero everywhere and so add zero to the partial sum.
  static Float BackwardVector(const DownGradTile& tile, const DownGradAccumulators& acc,
                              const Position& at, Float partial) {
    const int64_t act = at.row * tile.act_stride + at.column;
    const int64_t out = at.row * tile.d_stride + at.column;
    const Float zero = Simd::Zero(), limit = Simd::Set(tile.swiglu_limit);
    const Float gate = Simd::Load(static_cast<const Element*>(tile.gate) + act, at.n);
    const Float up = Simd::Load(static_cast<const Element*>(tile.up) + act, at.n);
    const Float d_hidden = Simd::Load(acc.d_hidden + at.row * acc.stride + at.column, at.n);
    const Clamped clamped(gate, up, tile.swiglu_limit);
    const Silu<Simd> silu(clamped.gate);
    const Float hidden = Round(Simd::Multiply(silu.value, clamped.up));
    const Float weight = Simd::Set(tile.router_weight[at.row]);
    const Float weighted = Simd::Multiply(weight, d_hidden);
    Float d_gate = Simd::Multiply(Simd::Multiply(weighted, clamped.up), silu.derivative);
    Float d_up = Simd::Multiply(weighted, silu.value);
    // A NaN is not "outside the clamp": it stays a NaN.
    d_gate = Simd::SelectGreater(gate, limit, zero, d_gate);
    d_up = Simd::SelectGreater(up, limit, zero, d_up);
    d_up = Simd::SelectGreater(Simd::Set(-tile.swiglu_limit), up, zero, d_up);
    Simd::Store(static_cast<Element*>(tile.d_gate) + out, d_gate, at.n);
    Simd::Store(static_cast<Element*>(tile.d_up) + out, d_up, at.n);
    Simd::Store(static_cast<Element*>(tile.weighted_h) + out, Simd::Multiply(weight, hidden), at.n);
    return Simd::MultiplyAdd(d_hidden, hidden, partial);
  }
};

}  // namespace mok
