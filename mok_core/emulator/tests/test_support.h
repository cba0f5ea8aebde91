// Helpers of the host side of kernel tests. Through the host seam, so that they serve both
// backends.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "mok_core/device/runtime.h"
#include "mok_core/dtype.h"
#include "mok_core/emulator/tests/test_kernel.h"

namespace mok::testing {

// An array in device memory, freed with the emulator's next FreeAll (or at the end of the process).
template <class T>
T* DeviceArray(const std::vector<T>& values, const char* name, int device = 0) {
  void* pointer = runtime::AllocateDevice(device, values.size() * sizeof(T), name).value();
  MOK_CHECK(runtime::CopyToDevice(pointer, values.data(), values.size() * sizeof(T)).ok());
  return static_cast<T*>(pointer);
}

// Device memory that holds no values yet (NaN in the emulator).
template <class T>
T* UninitializedArray(size_t count, const char* name, int device = 0) {
  return static_cast<T*>(runtime::AllocateDevice(device, count * sizeof(T), name).value());
}

template <class T>
std::vector<T> HostCopy(const T* device, size_t count) {
  std::vector<T> values(count);
  MOK_CHECK(runtime::CopyToHost(values.data(), device, count * sizeof(T)).ok());
  return values;
}

// bf16 values m/8 with |m| <= 8: products and short sums of them are exact in fp32.
inline std::vector<uint16_t> ExactBFloat16(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint16_t> values(count);
  for (uint16_t& value : values) {
    value = RoundToBFloat16(static_cast<float>(static_cast<int>(random() % 17) - 8) / 8).bits;
  }
  return values;
}

inline float BFloat16ToFloat(uint16_t bits) { return ToFloat(BFloat16{bits}); }

// A B^T for A [m, k], B [n, k]: exact if the operands are ExactBFloat16 and k is moderate.
inline std::vector<float> ExactProduct(const std::vector<uint16_t>& a,
                                       const std::vector<uint16_t>& b, int m, int n, int k) {
  std::vector<float> product(static_cast<size_t>(m) * n);
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      float sum = 0;
      for (int x = 0; x < k; ++x)
        sum += BFloat16ToFloat(a[i * k + x]) * BFloat16ToFloat(b[j * k + x]);
      product[static_cast<size_t>(i) * n + j] = sum;
    }
  }
  return product;
}

// A row-major bf16 or byte matrix [rows, columns] as a two-dimensional tensor map.
inline TensorMap MatrixMap(const void* base, uint64_t rows, uint64_t columns, int element_bytes,
                           uint32_t box_rows, uint32_t box_columns) {
  runtime::TensorMapSpec spec{};
  spec.base = const_cast<void*>(base);
  spec.element_bytes = element_bytes;
  spec.rank = 2;
  spec.dimensions[0] = columns;
  spec.dimensions[1] = rows;
  spec.strides[0] = columns * element_bytes;
  spec.box[0] = box_columns;
  spec.box[1] = box_rows;
  spec.swizzle = Swizzle::k128;
  return runtime::EncodeTensorMap(spec).value();
}

struct LaunchOptions {
  unsigned blocks = 1, cluster = 1;
  int registers = 168;
  int device = 0;
  void* stream = nullptr;
  const char* name = "kernel";
};

template <class Params>
Status Launch(const TestKernel& kernel, const Params& params, const LaunchOptions& options) {
  runtime::LaunchConfig config;
  config.grid = {options.blocks, 1, 1};
  config.block = {kernel.threads, 1, 1};
  config.cluster = {options.cluster, 1, 1};
  config.shared_bytes = kernel.shared_bytes;
  config.registers_per_thread = options.registers;
  config.device = options.device;
  config.stream = options.stream;
  config.name = options.name;
  return runtime::LaunchKernelAddress(kernel.address, config, &params, sizeof(Params));
}

}  // namespace mok::testing
