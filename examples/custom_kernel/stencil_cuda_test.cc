#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <vector>

#include "stencil.h"
#include "stencil_cuda.h"

namespace custom_kernel {
namespace {

TEST(StencilCudaTest, DeviceAgreesWithHost) {
  int device_count = 0;
  if (cudaGetDeviceCount(&device_count) != cudaSuccess || device_count == 0) {
    GTEST_SKIP() << "no CUDA device; the kernel is compiled and linked";
  }
  constexpr int64_t kRows = 5;
  constexpr int64_t kColumns = 300;
  std::vector<float> grid(kRows * kColumns), scratch(grid.size()), result(grid.size());
  for (size_t i = 0; i < grid.size(); ++i) grid[i] = static_cast<float>(i % 13);
  const size_t bytes = grid.size() * sizeof(float);
  float* input = nullptr;
  float* output = nullptr;
  ASSERT_EQ(cudaMalloc(&input, bytes), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&output, bytes), cudaSuccess);
  ASSERT_EQ(cudaMemcpy(input, grid.data(), bytes, cudaMemcpyDefault), cudaSuccess);
  ASSERT_EQ(UpdateOnDevice(input, output, kRows, kColumns), 0);
  ASSERT_EQ(cudaMemcpy(result.data(), output, bytes, cudaMemcpyDefault), cudaSuccess);
  RunSerially(mok::ContiguousMatrix(grid.data(), kRows, kColumns),
              mok::ContiguousMatrix(scratch.data(), kRows, kColumns), 1);
  for (size_t i = 0; i < grid.size(); ++i) EXPECT_NEAR(result[i], grid[i], 1e-5f);
  cudaFree(input);
  cudaFree(output);
}

}  // namespace
}  // namespace custom_kernel
