#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "third_party/cuda/chain/tile_copy.h"

namespace mok::cuda_chain {
namespace {

constexpr int kTileSize = kTileRows * kTileColumns;

TEST(TileCopyTest, SwizzlePermutesTheTile) {
  std::set<int> indices;
  for (int row = 0; row < kTileRows; ++row) {
    for (int column = 0; column < kTileColumns; ++column) {
      indices.insert(SwizzledIndex(row, column));
      EXPECT_EQ(SwizzledIndex(row, column) / kTileColumns, row);
    }
  }
  EXPECT_EQ(indices.size(), static_cast<size_t>(kTileSize));
  EXPECT_EQ(SwizzledIndex(2, 0), 2 * kTileColumns + 4);
}

TEST(TileCopyTest, DeviceAgreesWithHost) {
  int device_count = 0;
  if (cudaGetDeviceCount(&device_count) != cudaSuccess || device_count == 0) {
    GTEST_SKIP() << "no CUDA device";
  }
  std::vector<float> source(kTileSize);
  for (int i = 0; i < kTileSize; ++i) source[i] = static_cast<float>(i);
  const size_t bytes = kTileSize * sizeof(float);
  float* device_source = nullptr;
  float* device_destination = nullptr;
  ASSERT_EQ(cudaMalloc(&device_source, bytes), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&device_destination, bytes), cudaSuccess);
  ASSERT_EQ(cudaMemcpy(device_source, source.data(), bytes, cudaMemcpyDefault), cudaSuccess);
  ASSERT_EQ(CopyTileSwizzled(device_source, device_destination), cudaSuccess);
  std::vector<float> result(kTileSize);
  ASSERT_EQ(cudaMemcpy(result.data(), device_destination, bytes, cudaMemcpyDefault), cudaSuccess);
  for (int row = 0; row < kTileRows; ++row) {
    for (int column = 0; column < kTileColumns; ++column) {
      EXPECT_EQ(result[SwizzledIndex(row, column)], source[row * kTileColumns + column]);
    }
  }
  cudaFree(device_source);
  cudaFree(device_destination);
}

}  // namespace
}  // namespace mok::cuda_chain
