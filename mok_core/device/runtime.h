// What host code needs of a GPU: memory, copies, tensor maps, launches. Two backends with the same
// functions: CUDA (//mok_core/device:runtime_cuda) and the emulator (//mok_core/emulator:runtime).
// A program links one of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mok_core/device/types.h"
#include "mok_core/status.h"

namespace mok::runtime {

// Devices that can be used.
StatusOr<int> DeviceCount();

struct DeviceProperties {
  int num_multiprocessors;
  int compute_major, compute_minor;  // compute capability
};
// 0 <= device < DeviceCount().
StatusOr<DeviceProperties> QueryDevice(int device);

// Memory of one device; of no bytes: nothing, or an address that is not to be used, for Free alone.
// `name` appears in the emulator's reports.
StatusOr<void*> AllocateDevice(int device, size_t bytes, const char* name);
// Host memory that every device can access at the same address. Zeroed.
StatusOr<void*> AllocateMappedHost(size_t bytes, const char* name);
// Frees either kind; null is nothing.
Status Free(void* pointer);

// Kernels on `device` may access memory of `peer`.
Status EnablePeerAccess(int device, int peer);

// Blocking copies, ordered after nothing: synchronise first to see what kernels have written. Those
// between host and device need no SM, so that kernels which hold all of them, waiting for the host
// or for another GPU, do not keep them from ending; Fill may need one.
Status CopyToDevice(void* device, const void* host, size_t bytes);
Status CopyToHost(void* host, const void* device, size_t bytes);
Status Fill(void* device, unsigned char value, size_t bytes);

// A stream of the device; lives until the process ends.
StatusOr<void*> CreateStream(int device);

// Waits for everything launched on every device. Emulator: runs it; a failed check is kInternal
// with the report.
Status Synchronize();

// A tensor in global memory and the box of it that one tensor copy moves.
struct TensorMapSpec {
  void* base;         // 16-byte aligned
  int element_bytes;  // 1 (bytes), 2 (bf16) or 4 (fp32)
  int rank;           // 1 to 5 dimensions, innermost first
  uint64_t dimensions[5];
  uint64_t strides[4];  // bytes between elements of dimensions 1 and up; multiples of 16
  uint32_t box[5];      // 1 to 256 elements; box[0] elements fill at most the swizzle span
  Swizzle swizzle = Swizzle::kNone;
};

// Checks the requirements above; names the field and the value that is wrong.
Status ValidateTensorMapSpec(const TensorMapSpec& spec);

// L2 promotion 256 bytes, out-of-bounds elements are zeros.
StatusOr<TensorMap> EncodeTensorMap(const TensorMapSpec& spec);

struct LaunchConfig {
  Index3 grid, block, cluster;
  size_t shared_bytes = 0;  // dynamic
  // Registers that the compiler gives each thread: the emulator checks the register file with it.
  int registers_per_thread = 168;
  int device = 0;
  void* stream = nullptr;  // cudaStream_t; the emulator tells streams apart by the pointer
  const char* name = "kernel";
};

// Launches on config.stream. `kernel` is the address of a kernel that takes `parameter_bytes` at
// `parameters` as its one parameter.
Status LaunchKernelAddress(const void* kernel, const LaunchConfig& config, const void* parameters,
                           size_t parameter_bytes);

}  // namespace mok::runtime
