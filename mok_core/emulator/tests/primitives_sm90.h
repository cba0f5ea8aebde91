// Single instructions on known data, for tests: what tensor copies leave in shared memory, what
// they store, and how arithmetic rounds. The emulator's results are compared with closed forms here
// and with the GPU's by emulator_validation_main.
#pragma once

#include "mok_core/device/types.h"
#include "mok_core/emulator/tests/test_kernel.h"

namespace mok::testing::primitives {

constexpr int kLoads = 4;        // of 2 to 5 dimensions
constexpr int kBoxBytes = 4096;  // of each load
constexpr int kStoreRows = 16, kStoreColumns = 64;

struct CopyParams {
  TensorMap loads[kLoads];         // bf16; loads[i] has 2 + i dimensions
  int32_t coordinates[kLoads][5];  // of each box's first element
  unsigned char* images;           // [kLoads, kBoxBytes]: shared memory after each load
  TensorMap store_2d, store_3d;    // bf16; boxes of kStoreRows x kStoreColumns
  int32_t store_coordinates[2][3];
};

// One block.
TestKernel CopyKernel();

constexpr int kThreads = 128;

struct MathParams {
  const float *x, *y, *z;  // [count]
  int32_t count;
  float *exponential, *reciprocal, *multiply_add, *product;  // [count], of x; x; x, y, z; x, y
  uint32_t* packed;                                          // [count], of x and y
  uint32_t* warp;  // [kThreads, 6]: shuffle, xor, up, down, ballot, population count
};

// One block of kThreads.
TestKernel MathKernel();

}  // namespace mok::testing::primitives
