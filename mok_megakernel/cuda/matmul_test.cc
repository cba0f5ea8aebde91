// The fp32 product in the emulator: exact values, every layout, tails, batch invariance.
#include "mok_megakernel/cuda/matmul.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <vector>

#include "mok_core/device/runtime.h"
#include "mok_core/emulator/tests/planted_bug.h"

namespace mok::testing {
namespace {

using Matrix = std::vector<float>;

Matrix RandomMatrix(int64_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Matrix matrix(static_cast<size_t>(size));
  for (float& value : matrix) value = normal(random);
  return matrix;
}

float* Upload(const Matrix& matrix) {
  const size_t bytes = matrix.size() * sizeof(float);
  void* memory = runtime::AllocateDevice(0, std::max<size_t>(bytes, 16), "matrix").value();
  if (bytes > 0) {
    EXPECT_EQ(runtime::CopyToDevice(memory, matrix.data(), bytes), OkStatus());
  }
  return static_cast<float*>(memory);
}

Matrix Multiply(int32_t layout, int64_t m, int64_t n, int64_t k, const Matrix& a, const Matrix& b) {
  StartCase({1, 0.1});
  MokMatmulArgs args{};
  args.struct_size = sizeof(args);
  args.layout = layout;
  args.m = m;
  args.n = n;
  args.k = k;
  args.a = Upload(a);
  args.b = Upload(b);
  Matrix c(static_cast<size_t>(m * n));
  args.c = Upload(Matrix(c.size(), NAN));
  EXPECT_EQ(CudaMatmul(&args, 0, nullptr), OkStatus());
  EXPECT_EQ(runtime::Synchronize(), OkStatus());
  EXPECT_EQ(runtime::CopyToHost(c.data(), args.c, c.size() * sizeof(float)), OkStatus());
  return c;
}

// One fused chain over k, as the header promises.
Matrix Expected(int32_t layout, int64_t m, int64_t n, int64_t k, const Matrix& a, const Matrix& b) {
  Matrix c(static_cast<size_t>(m * n));
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      float sum = 0;
      for (int64_t l = 0; l < k; ++l) {
        const int64_t left = layout == MOK_MATMUL_TN ? l * m + i : i * k + l;
        const int64_t right = layout == MOK_MATMUL_NT ? j * k + l : l * n + j;
        sum = std::fmaf(a[static_cast<size_t>(left)], b[static_cast<size_t>(right)], sum);
      }
      c[static_cast<size_t>(i * n + j)] = sum;
    }
  }
  return c;
}

TEST(CudaMatmulTest, EveryLayoutSumsInTheOrderOfK) {
  for (const int32_t layout : {MOK_MATMUL_NT, MOK_MATMUL_NN, MOK_MATMUL_TN}) {
    for (const auto& [m, n, k] : {std::array<int64_t, 3>{1, 1, 1},
                                  {3, 5, 17},
                                  {64, 64, 16},
                                  {70, 65, 33},
                                  {2, 130, 40},
                                  {5, 7, 0}}) {
      const Matrix a = RandomMatrix(m * k, 1), b = RandomMatrix(n * k, 2);
      EXPECT_EQ(Multiply(layout, m, n, k, a, b), Expected(layout, m, n, k, a, b))
          << "layout " << layout << ", " << m << " x " << n << " x " << k;
    }
  }
}

}  // namespace
}  // namespace mok::testing
