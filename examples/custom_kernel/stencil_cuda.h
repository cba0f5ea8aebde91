// The grid update as a CUDA kernel.
#pragma once

#include <cstdint>

namespace custom_kernel {

// One update of a [rows, columns] grid in device memory on the current device, from `input` to
// `output`; returns a cudaError_t (0 is success).
int UpdateOnDevice(const float* input, float* output, int64_t rows, int64_t columns);

}  // namespace custom_kernel
