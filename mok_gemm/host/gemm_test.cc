#include "mok_gemm/host/gemm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "mok_gemm/host/test_matrix.h"

namespace mok {
namespace {

constexpr GemmLayout kLayouts[] = {GemmLayout::kNT, GemmLayout::kNN, GemmLayout::kTN};

// Operands of a product, filled with normal values.
struct Operands {
  Operands(GemmLayout layout, DType in_dtype, int64_t m, int64_t n, int64_t k)
      : a(in_dtype, layout == GemmLayout::kTN ? k : m, layout == GemmLayout::kTN ? m : k),
        b(in_dtype, layout == GemmLayout::kNT ? n : k, layout == GemmLayout::kNT ? k : n) {
    a.FillNormal(1);
    b.FillNormal(2);
    problem.layout = layout;
    problem.m = m;
    problem.n = n;
    problem.k = k;
    problem.in_dtype = in_dtype;
    problem.a = a.at();
    problem.a_stride = a.stride();
    problem.b = b.at();
    problem.b_stride = b.stride();
  }

  GemmProblem Into(const TestMatrix& c) const {
    GemmProblem result = problem;
    result.out_dtype = c.dtype();
    result.c = c.at();
    result.c_stride = c.stride();
    return result;
  }

  Reference Expected() const {
    Reference sum(problem.m, problem.n);
    const Reference left(a), right(b);
    AddProductNt(problem.layout == GemmLayout::kTN ? Transposed(left) : left,
                 problem.layout == GemmLayout::kNT ? right : Transposed(right), sum);
    return sum;
  }

  TestMatrix a, b;
  GemmProblem problem;
};

class GemmTest : public testing::TestWithParam<IsaAndDType> {};

INSTANTIATE_TEST_SUITE_P(AllIsas, GemmTest, testing::ValuesIn(AllIsasAndDTypes()),
                         [](const auto& info) { return TestName(info.param); });

TEST_P(GemmTest, MatchesReference) {
  using Size = std::tuple<int64_t, int64_t, int64_t>;
  for (const auto& [m, n, k] : {Size{1, 40, 33}, Size{130, 33, 70}, Size{37, 300, 517},
                                Size{257, 257, 129}, Size{300, 64, 1}, Size{5, 600, 1100}}) {
    for (const GemmLayout layout : kLayouts) {
      const Operands operands(layout, GetParam().dtype, m, n, k);
      const Reference expected = operands.Expected();
      for (const DType out_dtype : {DType::kBf16, DType::kFp32}) {
        SCOPED_TRACE(testing::Message() << static_cast<int>(layout) << ": " << m << " x " << n
                                        << " x " << k << " into " << DTypeName(out_dtype));
        const TestMatrix c(out_dtype, m, n);
        ASSERT_TRUE(Gemm(GetParam().isa, 2, operands.Into(c)).ok());
        ASSERT_EQ(Mismatch(c, expected), "");
      }
    }
  }
}

// The same bits for every number of workers and for every part of the rows alone.
TEST_P(GemmTest, BitsDoNotDependOnWorkersOrRows) {
  constexpr int64_t kM = 300, kN = 90, kK = 171;
  for (const GemmLayout layout : kLayouts) {
    SCOPED_TRACE(static_cast<int>(layout));
    const Operands operands(layout, GetParam().dtype, kM, kN, kK);
    const TestMatrix whole(DType::kFp32, kM, kN);
    ASSERT_TRUE(Gemm(GetParam().isa, 1, operands.Into(whole)).ok());
    for (const int workers : {2, 3, 8}) {
      const TestMatrix c(DType::kFp32, kM, kN);
      ASSERT_TRUE(Gemm(GetParam().isa, workers, operands.Into(c)).ok());
      ASSERT_EQ(c.Bits(), whole.Bits()) << workers << " workers";
    }
    const TestMatrix pieces(DType::kFp32, kM, kN);
    for (int64_t row = 0, rows; row < kM; row += rows) {
      rows = std::min<int64_t>(1 + row * 7 % 50, kM - row);
      GemmProblem part = operands.Into(pieces);
      part.m = rows;
      part.a = layout == GemmLayout::kTN ? operands.a.at(0, row) : operands.a.at(row);
      part.c = pieces.at(row);
      ASSERT_TRUE(Gemm(GetParam().isa, 1, part).ok());
    }
    ASSERT_EQ(pieces.Bits(), whole.Bits());
  }
}

TEST_P(GemmTest, EmptyExtents) {
  for (const GemmLayout layout : kLayouts) {
    TestMatrix c(DType::kFp32, 40, 50), zeros(DType::kFp32, 40, 50);
    GemmProblem problem = Operands(layout, GetParam().dtype, 40, 50, 1).Into(c);
    problem.k = 0;
    ASSERT_TRUE(Gemm(GetParam().isa, 2, problem).ok());
    EXPECT_EQ(c.Bits(), zeros.Fill(0.0).Bits());
    problem.m = 0;
    problem.a = problem.b = problem.c = nullptr;
    EXPECT_TRUE(Gemm(GetParam().isa, 2, problem).ok());
  }
}

// One runner serves problems of all kinds one after the other, on any RunOnWorkers.
TEST_P(GemmTest, ARunnerIsReusable) {
  GemmRunner runner(GetParam().isa, 3);
  const RunOnWorkers serial = [](int num_workers, const std::function<void(int)>& body) {
    for (int worker = num_workers - 1; worker >= 0; --worker) body(worker);
  };
  for (const DType dtype : {DType::kBf16, DType::kFp32}) {
    for (const GemmLayout layout : kLayouts) {
      const Operands operands(layout, dtype, 200, 70, 40);
      const TestMatrix c(dtype, 200, 70), d(dtype, 200, 70);
      ASSERT_TRUE(runner.Run(operands.Into(c)).ok());
      ASSERT_TRUE(runner.Run(operands.Into(d), serial).ok());
      EXPECT_EQ(c.Bits(), d.Bits());
      EXPECT_EQ(Mismatch(c, operands.Expected()), "");
    }
  }
}

TEST(GemmStatusTest, WrongArgumentsAreNamed) {
  const Operands operands(GemmLayout::kNN, DType::kFp32, 4, 5, 6);
  const TestMatrix c(DType::kFp32, 4, 5);
  const GemmProblem good = operands.Into(c);
  const auto message = [](const GemmProblem& problem) {
    const Status status = Gemm(Isa::kPortable, 1, problem);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  GemmProblem bad = good;
  bad.k = -1;
  EXPECT_EQ(message(bad), "Gemm: m, n, k: expected 0 or more, got 4, 5, -1");
  bad = good;
  bad.in_dtype = DType::kE4m3;
  EXPECT_EQ(message(bad), "Gemm: in_dtype: expected bf16 or fp32, got e4m3");
  bad = good;
  bad.out_dtype = DType::kE8m0;
  EXPECT_EQ(message(bad), "Gemm: out_dtype: expected bf16 or fp32, got e8m0");
  bad = good;
  bad.a_stride = 5;
  EXPECT_EQ(message(bad), "Gemm: stride of a: expected at least 6, got 5");
  bad = good;
  bad.b_stride = 4;
  EXPECT_EQ(message(bad), "Gemm: stride of b: expected at least 5, got 4");
  bad = good;
  bad.c = nullptr;
  EXPECT_EQ(message(bad), "Gemm: c is null");
  bad = good;
  bad.layout = static_cast<GemmLayout>(3);
  EXPECT_EQ(message(bad), "Gemm: layout: expected 0 (NT), 1 (NN) or 2 (TN), got 3");
}

}  // namespace
}  // namespace mok
