// The bits of a result depend on its own row, column and K only: tiles cut in any other way, run in
// any other order, by any other worker, on rows surrounded by other rows, give the same bits.
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>

#include "mok_gemm/host/test_matrix.h"
#include "mok_gemm/host/tile_worker.h"

namespace mok {
namespace {

// A tile cut out of a problem.
struct Cut {
  int first_row, rows, first_column, columns;
};

class DeterminismTest : public testing::TestWithParam<IsaAndDType> {
 protected:
  static constexpr int kNumCuts = 25;

  TestMatrix Random(int64_t rows, int64_t columns, uint32_t seed) const {
    TestMatrix matrix(GetParam().dtype, rows, columns);
    matrix.FillNormal(seed);
    return matrix;
  }
  TestMatrix Output(int64_t rows, int64_t columns) const {
    return TestMatrix(GetParam().dtype, rows, columns);
  }

  Cut RandomCut(int rows, int columns) {
    const auto pick = [&](int limit) { return static_cast<int>(generator_() % limit); };
    Cut cut = {pick(rows), 0, pick(columns), 0};
    cut.rows = 1 + pick(rows - cut.first_row);
    cut.columns = 1 + pick(columns - cut.first_column);
    return cut;
  }

  // The bits of the part `cut` of a matrix.
  static std::string BitsOf(const TestMatrix& matrix, const Cut& cut) {
    std::string bits;
    for (int r = 0; r < cut.rows; ++r) {
      bits.append(static_cast<const char*>(matrix.at(cut.first_row + r, cut.first_column)),
                  cut.columns * ElementBytes(matrix.dtype()));
    }
    return bits;
  }

  // run(worker, cut, out) computes the part `cut` of a problem with one output, all of which is
  // `all`: random cuts by either worker are parts of the whole, bit for bit.
  template <class Run>
  void ExpectCutsAgree(const Cut& all, DType dtype, const Run& run) {
    const TestMatrix whole(dtype, all.rows, all.columns);
    run(worker_, all, whole);
    for (int i = 0; i < kNumCuts; ++i) {
      const Cut cut = RandomCut(all.rows, all.columns);
      const TestMatrix part(dtype, cut.rows, cut.columns);
      run(i % 2 ? worker_ : other_, cut, part);
      ASSERT_EQ(part.Bits(), BitsOf(whole, cut));
    }
  }

  std::mt19937 generator_{7};
  TileWorker worker_{GetParam().isa, GetParam().dtype};
  TileWorker other_{GetParam().isa, GetParam().dtype};
};

INSTANTIATE_TEST_SUITE_P(AllIsas, DeterminismTest, testing::ValuesIn(AllIsasAndDTypes()),
                         [](const auto& info) { return TestName(info.param); });

// Sizes beside the multiples of vectors and K blocks.
constexpr int64_t kDepths[] = {5, 96, 601};

TEST_P(DeterminismTest, GateUp) {
  for (const int64_t depth : kDepths) {
    const TestMatrix x = Random(kHostTileRows, depth, 1);
    const TestMatrix w_gate = Random(kHostTileI, depth, 2), w_up = Random(kHostTileI, depth, 3);
    const auto run = [&](TileWorker& worker, const Cut& cut, const TestMatrix& gate,
                         const TestMatrix& up, const TestMatrix& activation) {
      worker.GateUp({.x = x.at(cut.first_row),
                     .x_stride = x.stride(),
                     .rows = cut.rows,
                     .hidden = depth,
                     .w_gate = w_gate.at(cut.first_column),
                     .w_up = w_up.at(cut.first_column),
                     .w_stride = w_up.stride(),
                     .columns = cut.columns,
                     .gate = gate.at(),
                     .up = up.at(),
                     .activation = activation.at(),
                     .out_stride = gate.stride(),
                     .swiglu_limit = 5.0f});
    };
    const Cut all = {0, kHostTileRows, 0, kHostTileI};
    const TestMatrix gate = Output(all.rows, all.columns), up = Output(all.rows, all.columns),
                     activation = Output(all.rows, all.columns);
    run(worker_, all, gate, up, activation);
    for (int i = 0; i < kNumCuts; ++i) {
      const Cut cut = RandomCut(all.rows, all.columns);
      const TestMatrix g = Output(cut.rows, cut.columns), u = Output(cut.rows, cut.columns),
                       h = Output(cut.rows, cut.columns);
      run(i % 2 ? worker_ : other_, cut, g, u, h);
      ASSERT_EQ(g.Bits(), BitsOf(gate, cut));
      ASSERT_EQ(u.Bits(), BitsOf(up, cut));
      ASSERT_EQ(h.Bits(), BitsOf(activation, cut));
    }
  }
}

TEST_P(DeterminismTest, Down) {
  for (const int64_t depth : kDepths) {
    const TestMatrix h = Random(kHostTileRows, depth, 1), w_down = Random(kHostTileH, depth, 2);
    const auto run = [&](TileWorker& worker, const Cut& cut, const TestMatrix& y) {
      worker.Down({.h = h.at(cut.first_row),
                   .h_stride = h.stride(),
                   .rows = cut.rows,
                   .intermediate = depth,
                   .w_down = w_down.at(cut.first_column),
                   .w_stride = w_down.stride(),
                   .columns = cut.columns,
                   .y = y.at(),
                   .y_stride = y.stride()});
    };
    const Cut all = {0, kHostTileRows, 0, kHostTileH};
    ExpectCutsAgree(all, GetParam().dtype, run);
  }
}

TEST_P(DeterminismTest, DownGrad) {
  for (const int64_t depth : kDepths) {
    const Cut all = {0, kHostTileRows, 0, kHostTileI};
    const TestMatrix d_out = Random(all.rows, depth, 1), w_down = Random(depth, all.columns, 2);
    const TestMatrix gate = Random(all.rows, all.columns, 3), up = Random(all.rows, all.columns, 4);
    TestMatrix weight(DType::kFp32, all.rows, 1);
    weight.FillNormal(5);
    struct Outputs {
      TestMatrix d_gate, d_up, weighted_h, partial;
    };
    const auto run = [&](TileWorker& worker, const Cut& cut) {
      // The router weights of the cut's rows, contiguous.
      TestMatrix weights(DType::kFp32, 1, cut.rows);
      for (int r = 0; r < cut.rows; ++r) weights.Set(0, r, weight.Get(cut.first_row + r, 0));
      Outputs out = {Output(cut.rows, cut.columns), Output(cut.rows, cut.columns),
                     Output(cut.rows, cut.columns), TestMatrix(DType::kFp32, cut.rows, 1)};
      worker.DownGrad({.d_out = d_out.at(cut.first_row),
                       .d_out_stride = d_out.stride(),
                       .rows = cut.rows,
                       .hidden = depth,
                       .w_down = w_down.at(0, cut.first_column),
                       .w_stride = w_down.stride(),
                       .columns = cut.columns,
                       .gate = gate.at(cut.first_row, cut.first_column),
                       .up = up.at(cut.first_row, cut.first_column),
                       .act_stride = up.stride(),
                       .router_weight = static_cast<const float*>(weights.at()),
                       .swiglu_limit = std::numeric_limits<float>::infinity(),
                       .d_gate = out.d_gate.at(),
                       .d_up = out.d_up.at(),
                       .weighted_h = out.weighted_h.at(),
                       .d_stride = out.d_gate.stride(),
                       .d_router_partial = static_cast<float*>(out.partial.at()),
                       .d_router_stride = out.partial.stride()});
      return out;
    };
    const Outputs whole = run(worker_, all);
    for (int i = 0; i < kNumCuts; ++i) {
      Cut cut = RandomCut(all.rows, all.columns);
      Outputs part = run(i % 2 ? worker_ : other_, cut);
      ASSERT_EQ(part.d_gate.Bits(), BitsOf(whole.d_gate, cut));
      ASSERT_EQ(part.d_up.Bits(), BitsOf(whole.d_up, cut));
      ASSERT_EQ(part.weighted_h.Bits(), BitsOf(whole.weighted_h, cut));
      // The router partial sums over the tile's columns: only the rows may be cut.
      cut.first_column = 0;
      cut.columns = all.columns;
      part = run(i % 2 ? worker_ : other_, cut);
      ASSERT_EQ(part.partial.Bits(), BitsOf(whole.partial, {cut.first_row, cut.rows, 0, 1}));
    }
  }
}

TEST_P(DeterminismTest, InputGrad) {
  for (const int64_t depth : kDepths) {
    const Cut all = {0, kHostTileRows, 0, kHostTileH};
    const TestMatrix d_gate = Random(all.rows, depth, 1), d_up = Random(all.rows, depth, 2);
    const TestMatrix w_gate = Random(depth, all.columns, 3), w_up = Random(depth, all.columns, 4);
    const auto run = [&](TileWorker& worker, const Cut& cut, const TestMatrix& d_x) {
      worker.InputGrad({.d_gate = d_gate.at(cut.first_row),
                        .d_up = d_up.at(cut.first_row),
                        .d_stride = d_up.stride(),
                        .rows = cut.rows,
                        .intermediate = depth,
                        .w_gate = w_gate.at(0, cut.first_column),
                        .w_up = w_up.at(0, cut.first_column),
                        .w_stride = w_up.stride(),
                        .columns = cut.columns,
                        .d_x = d_x.at(),
                        .d_x_stride = d_x.stride()});
    };
    ExpectCutsAgree(all, GetParam().dtype, run);
  }
}

TEST_P(DeterminismTest, WeightGrad) {
  for (const int64_t rows : {int64_t{5}, int64_t{128}, int64_t{601}}) {
    const Cut all = {0, kHostGradTileRows, 0, kHostGradTileColumns};
    const TestMatrix a = Random(rows, all.rows, 1), b = Random(rows, all.columns, 2);
    const auto run = [&](TileWorker& worker, const Cut& cut, const TestMatrix& out) {
      WeightGradTile tile;
      tile.a = a.at(0, cut.first_row);
      tile.a_stride = a.stride();
      tile.b = b.at(0, cut.first_column);
      tile.b_stride = b.stride();
      tile.rows = rows;
      tile.m = cut.rows;
      tile.n = cut.columns;
      tile.out = out.at();
      tile.out_stride = out.stride();
      tile.out_dtype = out.dtype();
      worker.WeightGrad(tile);
    };
    ExpectCutsAgree(all, DType::kFp32, run);
  }
}

// NaN and infinite values of one row reach no other row.
TEST_P(DeterminismTest, ABadRowStaysAlone) {
  const TestMatrix w_down = Random(50, 70, 2);
  TestMatrix h = Random(30, 70, 1);
  const auto run = [&](const TestMatrix& y) {
    worker_.Down({.h = h.at(),
                  .h_stride = h.stride(),
                  .rows = 30,
                  .intermediate = 70,
                  .w_down = w_down.at(),
                  .w_stride = w_down.stride(),
                  .columns = 50,
                  .y = y.at(),
                  .y_stride = y.stride()});
  };
  const TestMatrix good = Output(30, 50), bad = Output(30, 50);
  run(good);
  for (int c = 0; c < 70; ++c) {
    h.Set(
        11, c,
        c % 2 ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity());
  }
  run(bad);
  EXPECT_EQ(BitsOf(bad, {0, 11, 0, 50}), BitsOf(good, {0, 11, 0, 50}));
  EXPECT_EQ(BitsOf(bad, {12, 18, 0, 50}), BitsOf(good, {12, 18, 0, 50}));
  for (int c = 0; c < 50; ++c) EXPECT_NE(bad.Get(11, c), bad.Get(11, c));
}

}  // namespace
}  // namespace mok
