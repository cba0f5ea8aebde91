// Each tile against a float64 reference: all tails, poisoned surroundings, every ISA and dtype.
#include "mok_gemm/host/tile_worker.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "mok_gemm/host/test_matrix.h"

namespace mok {
namespace {

constexpr float kNoLimit = std::numeric_limits<float>::infinity();

struct Extents {
  int rows, columns;
  int64_t depth;

  // A row of a few elements may consist of nothing but cancellation, so that its relative error
  // says little. Operands without sign keep narrow results well conditioned.
  bool narrow() const { return columns < 32; }
};

// Sizes around every boundary of the code: vectors, panels, groups of rows, pairs, K blocks.
std::vector<Extents> TailExtents(int max_rows, int max_columns) {
  std::vector<Extents> all;
  for (int rows = 1; rows <= max_rows; ++rows) all.push_back({rows, 40, 19});
  for (int columns = 1; columns <= max_columns; ++columns) all.push_back({20, columns, 21});
  for (int64_t depth = 1; depth <= 66; ++depth) all.push_back({14, 18, depth});
  for (const int64_t depth : {127, 255, 256, 257, 511, 512, 513, 514, 770, 1023, 1025, 1543}) {
    all.push_back({35, 70, depth});
  }
  all.push_back({max_rows, max_columns, 1});
  all.push_back({max_rows, max_columns, 600});
  all.push_back({1, 1, 1});
  return all;
}

double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

class TileWorkerTest : public testing::TestWithParam<IsaAndDType> {
 protected:
  DType dtype() const { return GetParam().dtype; }
  // An operand of a tile of this size.
  TestMatrix Random(const Extents& size, int64_t rows, int64_t columns, uint32_t seed,
                    double deviation = 1.0) const {
    TestMatrix matrix(dtype(), rows, columns);
    matrix.FillNormal(seed, deviation);
    if (size.narrow()) matrix.MakePositive();
    return matrix;
  }
  TestMatrix Output(int64_t rows, int64_t columns) const {
    return TestMatrix(dtype(), rows, columns, 5);
  }

  TileWorker worker_{GetParam().isa, GetParam().dtype};
};

INSTANTIATE_TEST_SUITE_P(AllIsas, TileWorkerTest, testing::ValuesIn(AllIsasAndDTypes()),
                         [](const auto& info) { return TestName(info.param); });

TEST_P(TileWorkerTest, GateUpMatchesReference) {
  for (const Extents& size : TailExtents(kHostTileRows, kHostTileI)) {
    SCOPED_TRACE(testing::Message() << size.rows << " x " << size.columns << " x " << size.depth);
    for (const float limit : {kNoLimit, 0.75f}) {
      const double deviation = 1.0 / std::sqrt(static_cast<double>(size.depth));
      const TestMatrix x = Random(size, size.rows, size.depth, 1);
      const TestMatrix w_gate = Random(size, size.columns, size.depth, 2, deviation);
      const TestMatrix w_up = Random(size, size.columns, size.depth, 3, deviation);
      const TestMatrix gate = Output(size.rows, size.columns), up = Output(size.rows, size.columns),
                       activation = Output(size.rows, size.columns);
      worker_.GateUp({.x = x.at(),
                      .x_stride = x.stride(),
                      .rows = size.rows,
                      .hidden = size.depth,
                      .w_gate = w_gate.at(),
                      .w_up = w_up.at(),
                      .w_stride = w_up.stride(),
                      .columns = size.columns,
                      .gate = gate.at(),
                      .up = up.at(),
                      .activation = activation.at(),
                      .out_stride = gate.stride(),
                      .swiglu_limit = limit});
      Reference g(size.rows, size.columns), u = g, h = g;
      AddProductNt(Reference(x), Reference(w_gate), g);
      AddProductNt(Reference(x), Reference(w_up), u);
      // h is defined on the rounded g and u.
      for (int r = 0; r < size.rows; ++r) {
        for (int c = 0; c < size.columns; ++c) {
          const double g_clamped = std::min<double>(gate.Get(r, c), limit);
          const double u_clamped = std::clamp<double>(up.Get(r, c), -limit, limit);
          h(r, c) = g_clamped * Sigmoid(g_clamped) * u_clamped;
        }
      }
      ASSERT_EQ(Mismatch(gate, g), "");
      ASSERT_EQ(Mismatch(up, u), "");
      ASSERT_EQ(Mismatch(activation, h), "");
    }
  }
}

TEST_P(TileWorkerTest, DownMatchesReference) {
  for (const Extents& size : TailExtents(kHostTileRows, kHostTileH)) {
    SCOPED_TRACE(testing::Message() << size.rows << " x " << size.columns << " x " << size.depth);
    const TestMatrix h = Random(size, size.rows, size.depth, 1);
    const TestMatrix w_down = Random(size, size.columns, size.depth, 2);
    const TestMatrix y = Output(size.rows, size.columns);
    worker_.Down({.h = h.at(),
                  .h_stride = h.stride(),
                  .rows = size.rows,
                  .intermediate = size.depth,
                  .w_down = w_down.at(),
                  .w_stride = w_down.stride(),
                  .columns = size.columns,
                  .y = y.at(),
                  .y_stride = y.stride()});
    Reference expected(size.rows, size.columns);
    AddProductNt(Reference(h), Reference(w_down), expected);
    ASSERT_EQ(Mismatch(y, expected), "");
  }
}

// The operands of a DownGrad tile, its outputs, and what they should be.
class DownGradCase {
 public:
  DownGradCase(DType dtype, const Extents& size, float limit)
      : size_(size),
        limit_(limit),
        d_out_(dtype, size.rows, size.depth),
        w_down_(dtype, size.depth, size.columns),
        gate_(dtype, size.rows, size.columns),
        up_(dtype, size.rows, size.columns),
        router_weight_(DType::kFp32, 1, size.rows),
        d_gate_(dtype, size.rows, size.columns),
        d_up_(dtype, size.rows, size.columns),
        weighted_h_(dtype, size.rows, size.columns),
        partial_(DType::kFp32, size.rows, 1) {
    d_out_.FillNormal(1);
    w_down_.FillNormal(2, 1.0 / std::sqrt(static_cast<double>(size.depth)));
    gate_.FillNormal(3);
    up_.FillNormal(4);
    router_weight_.FillNormal(5);
    if (size.narrow()) {
      for (TestMatrix* matrix : {&d_out_, &w_down_, &gate_, &up_}) matrix->MakePositive();
    }
    router_weight_.Set(0, size.rows / 2, 0.0);
    // Values equal to the bounds are inside the clamp.
    if (std::isfinite(limit)) {
      gate_.Set(0, 0, limit);
      up_.Set(0, 0, limit);
      up_.Set(size.rows - 1, size.columns - 1, -limit);
    }
  }

  void Run(TileWorker& worker) {
    worker.DownGrad({.d_out = d_out_.at(),
                     .d_out_stride = d_out_.stride(),
                     .rows = size_.rows,
                     .hidden = size_.depth,
                     .w_down = w_down_.at(),
                     .w_stride = w_down_.stride(),
                     .columns = size_.columns,
                     .gate = gate_.at(),
                     .up = up_.at(),
                     .act_stride = gate_.stride(),
                     .router_weight = static_cast<const float*>(router_weight_.at()),
                     .swiglu_limit = limit_,
                     .d_gate = d_gate_.at(),
                     .d_up = d_up_.at(),
                     .weighted_h = weighted_h_.at(),
                     .d_stride = d_gate_.stride(),
                     .d_router_partial = static_cast<float*>(partial_.at()),
                     .d_router_stride = partial_.stride()});
  }

  void Check() const {
    Reference dhu(size_.rows, size_.columns);
    AddProductNt(Reference(d_out_), Transposed(Reference(w_down_)), dhu);
    Reference d_gate(size_.rows, size_.columns), d_up = d_gate, weighted_h = d_gate;
    double partial_error = 0.0, partial_norm = 0.0;
    for (int r = 0; r < size_.rows; ++r) {
      const double weight = router_weight_.Get(0, r);
      double partial = 0.0, partial_terms = 0.0;
      for (int c = 0; c < size_.columns; ++c) {
        const double g = gate_.Get(r, c), u = up_.Get(r, c);
        const double g_clamped = std::min<double>(g, limit_);
        const double u_clamped = std::clamp<double>(u, -limit_, limit_);
        const double sigmoid = Sigmoid(g_clamped), silu = g_clamped * sigmoid;
        const double d_silu = sigmoid * (1.0 + g_clamped * (1.0 - sigmoid));
        const double h = silu * u_clamped;
        d_gate(r, c) = g > limit_ ? 0.0 : weight * dhu(r, c) * u_clamped * d_silu;
        d_up(r, c) = std::abs(u) > limit_ ? 0.0 : weight * dhu(r, c) * silu;
        weighted_h(r, c) = weight * h;
        partial += dhu(r, c) * h;
        partial_terms += std::abs(dhu(r, c) * h);
      }
      partial_error += std::pow(partial_.Get(r, 0) - partial, 2);
      partial_norm += partial_terms * partial_terms;
    }
    ASSERT_EQ(Mismatch(d_gate_, d_gate), "");
    ASSERT_EQ(Mismatch(d_up_, d_up), "");
    ASSERT_EQ(Mismatch(weighted_h_, weighted_h), "");
    // A sum of signed terms: relative to the sum of their magnitudes.
    ASSERT_LE(std::sqrt(partial_error / partial_norm), ToleranceFor(d_gate_.dtype()).whole);
    ASSERT_TRUE(partial_.SurroundingsIntact());
  }

 private:
  Extents size_;
  float limit_;
  TestMatrix d_out_, w_down_, gate_, up_, router_weight_, d_gate_, d_up_, weighted_h_, partial_;
};

TEST_P(TileWorkerTest, DownGradMatchesReference) {
  for (const Extents& size : TailExtents(kHostTileRows, kHostTileI)) {
    SCOPED_TRACE(testing::Message() << size.rows << " x " << size.columns << " x " << size.depth);
    for (const float limit : {kNoLimit, 0.75f}) {
      DownGradCase test(dtype(), size, limit);
      test.Run(worker_);
      ASSERT_NO_FATAL_FAILURE(test.Check());
    }
  }
}

TEST_P(TileWorkerTest, InputGradMatchesReference) {
  for (const Extents& size : TailExtents(kHostTileRows, kHostTileH)) {
    SCOPED_TRACE(testing::Message() << size.rows << " x " << size.columns << " x " << size.depth);
    const TestMatrix d_gate = Random(size, size.rows, size.depth, 1);
    const TestMatrix d_up = Random(size, size.rows, size.depth, 2);
    const TestMatrix w_gate = Random(size, size.depth, size.columns, 3);
    const TestMatrix w_up = Random(size, size.depth, size.columns, 4);
    const TestMatrix d_x = Output(size.rows, size.columns);
    worker_.InputGrad({.d_gate = d_gate.at(),
                       .d_up = d_up.at(),
                       .d_stride = d_gate.stride(),
                       .rows = size.rows,
                       .intermediate = size.depth,
                       .w_gate = w_gate.at(),
                       .w_up = w_up.at(),
                       .w_stride = w_gate.stride(),
                       .columns = size.columns,
                       .d_x = d_x.at(),
                       .d_x_stride = d_x.stride()});
    Reference expected(size.rows, size.columns);
    AddProductNt(Reference(d_gate), Transposed(Reference(w_gate)), expected);
    AddProductNt(Reference(d_up), Transposed(Reference(w_up)), expected);
    ASSERT_EQ(Mismatch(d_x, expected), "");
  }
}

TEST_P(TileWorkerTest, WrongExtentsEndTheProcess) {
  DownTile tile;
  tile.rows = kHostTileRows + 1;
  EXPECT_DEATH(worker_.Down(tile), "Down rows: expected 1 to 128, got 129");
  tile.rows = 1;
  EXPECT_DEATH(worker_.Down(tile), "Down columns: expected 1 to 256, got 0");
}

}  // namespace
}  // namespace mok
