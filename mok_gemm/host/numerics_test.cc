// The arithmetic that tile_worker.h promises, bit for bit, against scalar code: the order of the
// sum and the roundings of each ISA.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "mok_gemm/host/gemm.h"
#include "mok_gemm/host/test_matrix.h"

namespace mok {
namespace {

// Flushes a denormal to a zero of its sign, as VDPBF16PS does to what it reads and writes.
float Flush(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

// sum over k of a[k] * b[k] as `isa` does it.
float Dot(const IsaAndDType& kind, const std::vector<float>& a, const std::vector<float>& b) {
  const size_t depth = a.size();
  float acc = 0.0f;
  if (kind.isa == Isa::kAvx512Bf16 && kind.dtype == DType::kBf16) {
    for (size_t k = 0; k < depth; k += 2) {
      const float odd_a = k + 1 < depth ? Flush(a[k + 1]) : 0.0f;
      const float odd_b = k + 1 < depth ? Flush(b[k + 1]) : 0.0f;
      acc = Flush(std::fmaf(odd_a, odd_b, acc));
      acc = Flush(std::fmaf(Flush(a[k]), Flush(b[k]), acc));
    }
    return acc;
  }
  for (size_t k = 0; k < depth; ++k) {
    if (kind.isa == Isa::kPortable) {
      const float product = a[k] * b[k];
      acc += product;
    } else {
      acc = std::fmaf(a[k], b[k], acc);
    }
  }
  return acc;
}

class NumericsTest : public testing::TestWithParam<IsaAndDType> {
 protected:
  // Checks every element of a product whose operands have this standard deviation.
  void CheckBits(GemmLayout layout, int64_t depth, double deviation) {
    constexpr int64_t kM = 23, kN = 37;
    const bool a_is_km = layout == GemmLayout::kTN, b_is_nk = layout == GemmLayout::kNT;
    TestMatrix a(GetParam().dtype, a_is_km ? depth : kM, a_is_km ? kM : depth);
    TestMatrix b(GetParam().dtype, b_is_nk ? kN : depth, b_is_nk ? depth : kN);
    a.FillNormal(1, deviation);
    b.FillNormal(2);
    const TestMatrix c(DType::kFp32, kM, kN);
    ASSERT_TRUE(Gemm(GetParam().isa, 1,
                     {.layout = layout,
                      .m = kM,
                      .n = kN,
                      .k = depth,
                      .in_dtype = GetParam().dtype,
                      .out_dtype = DType::kFp32,
                      .a = a.at(),
                      .a_stride = a.stride(),
                      .b = b.at(),
                      .b_stride = b.stride(),
                      .c = c.at(),
                      .c_stride = c.stride()})
                    .ok());
    std::vector<float> left(depth), right(depth);
    for (int64_t i = 0; i < kM; ++i) {
      for (int64_t j = 0; j < kN; ++j) {
        for (int64_t k = 0; k < depth; ++k) {
          left[k] = static_cast<float>(a_is_km ? a.Get(k, i) : a.Get(i, k));
          right[k] = static_cast<float>(b_is_nk ? b.Get(j, k) : b.Get(k, j));
        }
        ASSERT_EQ(static_cast<float>(c.Get(i, j)), Dot(GetParam(), left, right))
            << "element " << i << ", " << j;
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(AllIsas, NumericsTest, testing::ValuesIn(AllIsasAndDTypes()),
                         [](const auto& info) { return TestName(info.param); });

TEST_P(NumericsTest, BitsAreThoseOfTheDocumentedSum) {
  for (const GemmLayout layout : {GemmLayout::kNT, GemmLayout::kNN, GemmLayout::kTN}) {
    for (const int64_t depth : {1, 2, 3, 64, 511, 513, 1026}) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(layout) << ", depth " << depth);
      ASSERT_NO_FATAL_FAILURE(CheckBits(layout, depth, 1.0));
    }
  }
}

// Around the smallest normal number, where the pair dot product flushes and the others do not.
TEST_P(NumericsTest, DenormalsAreFlushedByThePairDotProductOnly) {
  for (const GemmLayout layout : {GemmLayout::kNT, GemmLayout::kNN, GemmLayout::kTN}) {
    ASSERT_NO_FATAL_FAILURE(CheckBits(layout, 5, 0x1p-127));
  }
}

// Different instruction sets differ by fp32 roundings of the sum only.
TEST_P(NumericsTest, InstructionSetsAgree) {
  TestMatrix a(GetParam().dtype, 60, 777), b(GetParam().dtype, 50, 777);
  a.FillNormal(1);
  b.FillNormal(2);
  TestMatrix c(DType::kFp32, 60, 50), portable(DType::kFp32, 60, 50);
  GemmProblem problem = {.layout = GemmLayout::kNT,
                         .m = 60,
                         .n = 50,
                         .k = 777,
                         .in_dtype = GetParam().dtype,
                         .out_dtype = DType::kFp32,
                         .a = a.at(),
                         .a_stride = a.stride(),
                         .b = b.at(),
                         .b_stride = b.stride(),
                         .c = c.at(),
                         .c_stride = c.stride()};
  ASSERT_TRUE(Gemm(GetParam().isa, 1, problem).ok());
  problem.c = portable.at();
  ASSERT_TRUE(Gemm(Isa::kPortable, 1, problem).ok());
  EXPECT_LE(Compare(c, Reference(portable)).whole, 1e-6);
}

}  // namespace
}  // namespace mok
