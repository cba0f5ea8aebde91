// The SwiGLU epilogues alone: every bf16 gate value, special values, the clamp.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "mok_gemm/host/kernels.h"
#include "mok_gemm/host/test_matrix.h"

namespace mok {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Exact {
  double silu, derivative;
};

Exact ExactSilu(double g) {
  const double sigmoid = 1.0 / (1.0 + std::exp(-g));
  const double complement = 1.0 / (1.0 + std::exp(g));
  return {g * sigmoid, sigmoid * (1.0 + g * complement)};
}

// One row as a transposed accumulator: [columns, 16 or fewer lanes], the row being column 0.
class TransposedRow {
 public:
  static constexpr int kStride = 16;

  explicit TransposedRow(const std::vector<float>& row)
      : values_((row.size() + kStride) * kStride, 0.0f) {
    for (size_t i = 0; i < row.size(); ++i) values_[i * kStride] = row[i];
  }
  const float* data() const { return values_.data(); }

 private:
  std::vector<float> values_;
};

// One row of fp32 gate and up values through the fp32 epilogues, with dh = 1.
struct Row {
  std::vector<float> hidden, d_gate, d_up, weighted_h;
  float partial;

  Row(Isa isa, const std::vector<float>& gate, const std::vector<float>& up, float limit)
      : hidden(gate.size()), d_gate(gate.size()), d_up(gate.size()), weighted_h(gate.size()) {
    const KernelTable& kernels = KernelsOf(isa, DType::kFp32);
    const auto columns = static_cast<int>(gate.size());
    std::vector<float> saved_gate(columns), saved_up(columns);
    kernels.swiglu_forward({.rows = 1,
                            .columns = columns,
                            .gate = saved_gate.data(),
                            .up = saved_up.data(),
                            .activation = hidden.data(),
                            .out_stride = columns,
                            .swiglu_limit = limit},
                           {.gate = TransposedRow(gate).data(),
                            .up = TransposedRow(up).data(),
                            .stride = TransposedRow::kStride,
                            .transposed = true});
    const std::vector<float> ones(columns, 1.0f);
    kernels.swiglu_backward({.rows = 1,
                             .columns = columns,
                             .gate = saved_gate.data(),
                             .up = saved_up.data(),
                             .act_stride = columns,
                             .router_weight = ones.data(),
                             .swiglu_limit = limit,
                             .d_gate = d_gate.data(),
                             .d_up = d_up.data(),
                             .weighted_h = weighted_h.data(),
                             .d_stride = columns,
                             .d_router_partial = &partial,
                             .d_router_stride = 1},
                            {.d_hidden = ones.data(), .stride = columns});
  }
};

std::vector<float> AllFiniteBFloat16() {
  std::vector<float> values;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = ToFloat(BFloat16{static_cast<uint16_t>(bits)});
    if (std::isfinite(value)) values.push_back(value);
  }
  return values;
}

class SwigluTest : public testing::TestWithParam<Isa> {};

INSTANTIATE_TEST_SUITE_P(AllIsas, SwigluTest, testing::ValuesIn(SupportedIsas()),
                         [](const auto& info) { return std::string(IsaName(info.param)); });

// The bounds that swiglu_kernel.h states.
TEST_P(SwigluTest, EveryBFloat16GateIsAccurate) {
  const std::vector<float> gate = AllFiniteBFloat16();
  const Row row(GetParam(), gate, std::vector<float>(gate.size(), 1.0f), kInfinity);
  double worst_value = 0.0, worst_derivative = 0.0;
  for (size_t i = 0; i < gate.size(); ++i) {
    const Exact exact = ExactSilu(gate[i]);
    const auto relative = [](double actual, double expected, double floor) {
      return std::abs(actual - expected) / std::max(std::abs(expected), floor);
    };
    worst_value = std::max(worst_value, relative(row.hidden[i], exact.silu, 1e-36));
    // For large negative g the derivative is far below the floor: there its own size counts.
    const double floor = gate[i] > -2.0f ? 0.1 : 1e-36;
    worst_derivative = std::max(worst_derivative, relative(row.d_gate[i], exact.derivative, floor));
    ASSERT_EQ(row.d_up[i], row.hidden[i]) << gate[i];
    ASSERT_EQ(row.weighted_h[i], row.hidden[i]) << gate[i];
  }
  EXPECT_LE(worst_value, 4e-7);
  EXPECT_LE(worst_derivative, 4e-7);
}

TEST_P(SwigluTest, SpecialValuesStayVisible) {
  const std::vector<float> gate = {kInfinity, -kInfinity, kNan, 0.0f, -0.0f, 1.0f, 1.0f, -150.0f};
  const std::vector<float> up = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, kNan, kInfinity, 1.0f};
  const Row row(GetParam(), gate, up, kInfinity);
  EXPECT_EQ(row.hidden[0], kInfinity);
  for (const int i : {1, 2, 5}) EXPECT_TRUE(std::isnan(row.hidden[i])) << i;
  for (const int i : {0, 1, 2, 5}) EXPECT_TRUE(std::isnan(row.d_gate[i])) << i;
  for (const int i : {1, 2}) EXPECT_TRUE(std::isnan(row.d_up[i])) << i;
  for (const int i : {3, 4}) EXPECT_EQ(row.hidden[i], 0.0f) << i;
  for (const int i : {3, 4}) EXPECT_EQ(row.d_gate[i], 0.5f) << i;
  EXPECT_EQ(row.hidden[6], kInfinity);
  EXPECT_EQ(row.hidden[7], 0.0f);
  EXPECT_TRUE(std::isnan(row.partial));
}

// torch.clamp's convention: the gradient passes where the value is inside or equal to the bound.
TEST_P(SwigluTest, ClampStopsTheGradientOutsideOnly) {
  constexpr float kLimit = 2.0f;
  const float above = std::nextafter(kLimit, 3.0f);
  const std::vector<float> gate = {kLimit, above, -5.0f, 1.0f, 1.0f, 1.0f, 1.0f, kInfinity, kNan};
  const std::vector<float> up = {1.0f,    1.0f,   1.0f,       kLimit, above,
                                 -kLimit, -above, -kInfinity, 1.0f};
  const Row row(GetParam(), gate, up, kLimit);
  const auto value = [](double g) { return ExactSilu(g).silu; };
  const auto slope = [](double g) { return ExactSilu(g).derivative; };
  const double hidden[] = {value(2),     value(2),      value(-5),     2 * value(1),
                           2 * value(1), -2 * value(1), -2 * value(1), -2 * value(2)};
  const double d_gate[] = {slope(2),     0.0,           slope(-5),     2 * slope(1),
                           2 * slope(1), -2 * slope(1), -2 * slope(1), 0.0};
  const double d_up[] = {value(2), value(2), value(-5), value(1), 0.0, value(1), 0.0, 0.0};
  for (int i = 0; i < 8; ++i) {
    EXPECT_NEAR(row.hidden[i], hidden[i], 1e-6) << i;
    EXPECT_NEAR(row.d_gate[i], d_gate[i], 1e-6) << i;
    EXPECT_NEAR(row.d_up[i], d_up[i], 1e-6) << i;
  }
  // No clamp hides a NaN.
  EXPECT_TRUE(std::isnan(row.hidden[8]));
  EXPECT_TRUE(std::isnan(row.d_gate[8]));
}

// bf16 outputs are the fp32 values rounded by RoundToBFloat16, for all 2^16 patterns (NaN
// included), and h is computed from the rounded g and u; from transposed sums and from upright
// ones. Where sums come from VDPBF16PS none is denormal.
TEST_P(SwigluTest, BFloat16OutputsAreRoundedOnce) {
  const KernelTable& kernels = KernelsOf(GetParam(), DType::kBf16);
  constexpr int kColumns = 1 << 16;
  std::vector<float> gate(kColumns), up(kColumns, 1.0f / 3.0f);
  for (uint32_t i = 0; i < kColumns; ++i) {
    // Every upper half with lower halves that round down, up, and to even.
    const uint32_t low = i % 3 == 0 ? 0x8000u : (i * 0x9E3779B1u) >> 16;
    gate[i] = BitCast<float>(i << 16 | low);
    if (GetParam() == Isa::kAvx512Bf16 && std::fpclassify(gate[i]) == FP_SUBNORMAL) gate[i] = 0.0f;
  }
  std::vector<BFloat16> saved_gate(kColumns), saved_up(kColumns), hidden(kColumns);
  const GateUpTile tile = {.rows = 1,
                           .columns = kColumns,
                           .gate = saved_gate.data(),
                           .up = saved_up.data(),
                           .activation = hidden.data(),
                           .out_stride = kColumns,
                           .swiglu_limit = kInfinity};
  kernels.swiglu_forward(tile, {.gate = TransposedRow(gate).data(),
                                .up = TransposedRow(up).data(),
                                .stride = TransposedRow::kStride,
                                .transposed = true});
  const auto bits = [](const BFloat16& a, const BFloat16& b) { return a.bits == b.bits; };
  const std::vector<BFloat16> from_transposed = hidden;
  std::fill(hidden.begin(), hidden.end(), BFloat16{});
  kernels.swiglu_forward(
      tile, {.gate = gate.data(), .up = up.data(), .stride = kColumns, .transposed = false});
  EXPECT_TRUE(std::equal(hidden.begin(), hidden.end(), from_transposed.begin(), bits));
  std::vector<float> rounded_gate(kColumns), rounded_up(kColumns);
  for (int i = 0; i < kColumns; ++i) {
    ASSERT_EQ(saved_gate[i].bits, RoundToBFloat16(gate[i]).bits) << i;
    ASSERT_EQ(saved_up[i].bits, RoundToBFloat16(up[i]).bits) << i;
    rounded_gate[i] = ToFloat(saved_gate[i]);
    rounded_up[i] = ToFloat(saved_up[i]);
  }
  const Row row(GetParam(), rounded_gate, rounded_up, kInfinity);
  for (int i = 0; i < kColumns; ++i) {
    if (std::isnan(row.hidden[i])) {
      ASSERT_TRUE(IsNan(hidden[i])) << i;
    } else {
      ASSERT_EQ(hidden[i].bits, RoundToBFloat16(row.hidden[i]).bits) << i;
    }
  }
}

}  // namespace
}  // namespace mok
