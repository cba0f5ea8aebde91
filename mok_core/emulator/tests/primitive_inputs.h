// Inputs of the primitives' kernels, shared by their test and the validation against the GPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "mok_core/emulator/tests/primitives_sm90.h"
#include "mok_core/emulator/tests/test_support.h"

namespace mok::testing {

constexpr int kStoredElements = 40 * 72;  // of each tensor that the copies store into

// One load, from which the test recomputes what it has to bring.
struct LoadSpec {
  int rank;
  uint64_t dimensions[5];
  uint64_t strides[4];  // in elements
  uint32_t box[5];
  Swizzle swizzle;
  int32_t coordinates[5];
};

// Boxes of 4096 bytes; parts of the first three lie outside their tensors. The last is a weight
// tile whose rows are permuted so that a thread's accumulators hold adjacent columns: the row 32g +
// 8j + 2q + b of shared memory is row 32g + 8q + 2j + b of the matrix.
inline const LoadSpec kLoadSpecs[primitives::kLoads] = {
    {2, {100, 50}, {104}, {64, 32}, Swizzle::k128, {72, -3}},
    {3, {40, 9, 5}, {48, 480}, {32, 8, 8}, Swizzle::k64, {-8, 4, 2}},
    {4, {16, 6, 5, 4}, {16, 96, 480}, {16, 4, 4, 8}, Swizzle::k32, {0, 3, 2, -1}},
    {5,
     {96, 2, 4, 4, 3},
     {96, 8 * 96, 2 * 96, 32 * 96},
     {64, 2, 4, 4, 1},
     Swizzle::k128,
     {32, 0, 0, 0, 1}},
};

// Element i of the source tensors.
inline uint16_t SourceElement(uint64_t i) { return static_cast<uint16_t>(i * 7 + 1); }

struct CopyCase {
  primitives::CopyParams params;
  uint16_t *stored_2d, *stored_3d;
};

inline TensorMap StoreMap(uint16_t* base, int rank, uint64_t columns = 64) {
  runtime::TensorMapSpec spec{};
  spec.base = base;
  spec.element_bytes = 2;
  spec.rank = rank;
  spec.dimensions[0] = columns;  // the box hangs over
  spec.strides[0] = 72 * 2;
  spec.box[0] = primitives::kStoreColumns;
  if (rank == 2) {
    spec.dimensions[1] = 40;
    spec.box[1] = primitives::kStoreRows;
    spec.swizzle = Swizzle::k128;
  } else {
    spec.dimensions[1] = 5;
    spec.dimensions[2] = 8;
    spec.strides[1] = 5 * 72 * 2;
    spec.box[1] = 4;
    spec.box[2] = primitives::kStoreRows / 4;
  }
  return runtime::EncodeTensorMap(spec).value();
}

inline CopyCase MakeCopyCase() {
  CopyCase test{};
  for (int i = 0; i < primitives::kLoads; ++i) {
    const LoadSpec& load = kLoadSpecs[i];
    runtime::TensorMapSpec spec{};
    uint64_t elements = load.dimensions[0];
    for (int d = 1; d < load.rank; ++d) elements += (load.dimensions[d] - 1) * load.strides[d - 1];
    std::vector<uint16_t> values(elements);
    for (uint64_t e = 0; e < elements; ++e) values[e] = SourceElement(e);
    spec.base = DeviceArray(values, "source");
    spec.element_bytes = 2;
    spec.rank = load.rank;
    spec.swizzle = load.swizzle;
    for (int d = 0; d < load.rank; ++d) {
      spec.dimensions[d] = load.dimensions[d];
      spec.box[d] = load.box[d];
      if (d > 0) spec.strides[d - 1] = load.strides[d - 1] * 2;
      test.params.coordinates[i][d] = load.coordinates[d];
    }
    test.params.loads[i] = runtime::EncodeTensorMap(spec).value();
  }
  test.params.images =
      UninitializedArray<unsigned char>(primitives::kLoads * primitives::kBoxBytes, "images");
  const std::vector<uint16_t> blank(kStoredElements, 0xABCD);
  test.stored_2d = DeviceArray(blank, "stored_2d");
  test.stored_3d = DeviceArray(blank, "stored_3d");
  test.params.store_2d = StoreMap(test.stored_2d, 2);
  test.params.store_3d = StoreMap(test.stored_3d, 3);
  const int32_t coordinates[2][3] = {{8, 30, 0}, {8, 2, 5}};
  std::memcpy(test.params.store_coordinates, coordinates, sizeof coordinates);
  return test;
}

inline primitives::MathParams MakeMathCase() {
  constexpr int kCount = 4096;
  std::mt19937 random(11);
  std::uniform_real_distribution<float> wide(-40.0f, 40.0f);
  std::vector<float> x(kCount), y(kCount), z(kCount);
  for (int i = 0; i < kCount; ++i) {
    x[i] = wide(random);
    y[i] = wide(random);
    z[i] = -x[i] * y[i] * (1 + 1e-6f * wide(random));  // cancels: fused or not makes a difference
  }
  const float special[] = {0.0f,     -0.0f,     1.0f, -1.0f,    0x1p-130f,
                           INFINITY, -INFINITY, NAN,  0x1p-126f};
  std::copy(std::begin(special), std::end(special), x.begin());
  primitives::MathParams p{};
  p.x = DeviceArray(x, "x");
  p.y = DeviceArray(y, "y");
  p.z = DeviceArray(z, "z");
  p.count = kCount;
  p.exponential = UninitializedArray<float>(kCount, "exponential");
  p.reciprocal = UninitializedArray<float>(kCount, "reciprocal");
  p.multiply_add = UninitializedArray<float>(kCount, "multiply_add");
  p.product = UninitializedArray<float>(kCount, "product");
  p.packed = UninitializedArray<uint32_t>(kCount, "packed");
  p.warp = UninitializedArray<uint32_t>(primitives::kThreads * 6, "warp");
  return p;
}

}  // namespace mok::testing
