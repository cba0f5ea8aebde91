#include <cuda_runtime.h>

#include <cute/layout.hpp>
#include <cute/swizzle_layout.hpp>

#include "third_party/cuda/chain/tile_copy.h"

namespace mok::cuda_chain {
namespace {

// A row is four 16-byte chunks; chunk c of row r goes to place c xor (r / 2).
__host__ __device__ auto TileLayout() {
  using Rows = cute::Int<kTileRows>;
  using Columns = cute::Int<kTileColumns>;
  return cute::composition(cute::Swizzle<2, 2, 3>{},
                           cute::make_layout(cute::make_shape(Rows{}, Columns{}),
                                             cute::make_stride(Columns{}, cute::Int<1>{})));
}

__global__ void CopyKernel(const float* source, float* destination) {
  const int row = static_cast<int>(threadIdx.y);
  const int column = static_cast<int>(threadIdx.x);
  destination[TileLayout()(row, column)] = source[row * kTileColumns + column];
}

}  // namespace

int SwizzledIndex(int row, int column) { return static_cast<int>(TileLayout()(row, column)); }

int CopyTileSwizzled(const float* source, float* destination) {
  CopyKernel<<<1, dim3(kTileColumns, kTileRows)>>>(source, destination);
  return static_cast<int>(cudaDeviceSynchronize());
}

}  // namespace mok::cuda_chain
