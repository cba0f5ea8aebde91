// The router's fp32 product on a GPU.
#pragma once

#include <cstdint>

#include "mok_core/status.h"
#include "mok_megakernel/mok.h"

namespace mok {

// c = a b with any strides: a(i, l) = a[i * a_row + l * a_column] is [m, k], b(l, j) likewise is
// [k, n], c [m, n] is contiguous.
struct MatmulParams {
  const float* a;
  const float* b;
  float* c;
  int64_t m, n, k;
  int64_t a_row, a_column;
  int64_t b_row, b_column;
};

inline constexpr int kMatmulTile = 64;  // rows and columns of c per block
inline constexpr int kMatmulThreads = 256;

// Address of the kernel and its shared memory. Grid: tiles of columns, tiles of rows.
const void* MatmulKernelAddress();
int64_t MatmulSharedBytes();

// mok_cuda_matmul.
Status CudaMatmul(const MokMatmulArgs* args, int device, void* stream);

}  // namespace mok
