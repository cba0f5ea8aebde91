// Test only: the device memory of a layer, and what comes back from it. Through the host seam.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "mok_core/dtype.h"
#include "mok_core/status.h"
#include "mok_megakernel/layer_test_support.h"

namespace mok::testing {

inline void MustSucceed(const Status& status) { MOK_CHECK(status.ok()) << status; }

// Allocations that end with it. No address is null, though there be no bytes.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* Allocate(int device, int64_t bytes, const char* name);
  void* AllocateZeroed(int device, int64_t bytes, const char* name);
  // Mapped host memory, zero.
  template <class T>
  T* AllocateMapped(const char* name) {
    return static_cast<T*>(AllocateMappedBytes(sizeof(T), name));
  }
  template <class T>
  T* Upload(int device, const T* values, int64_t count, const char* name) {
    return static_cast<T*>(
        UploadBytes(device, values, count * static_cast<int64_t>(sizeof(T)), name));
  }
  BFloat16* UploadTensor(int device, const Tensor& tensor, int64_t begin, int64_t count,
                         const char* name) {
    return Upload(device, static_cast<const BFloat16*>(tensor.At(begin)), count, name);
  }
  // What a pass has to write: Poison fills it with NaN.
  template <class T>
  T* Output(int device, int64_t count, const char* name) {
    return static_cast<T*>(OutputBytes(device, count * static_cast<int64_t>(sizeof(T)), name));
  }
  void Poison() const;

 private:
  void* AllocateMappedBytes(size_t bytes, const char* name);
  void* UploadBytes(int device, const void* values, int64_t bytes, const char* name);
  void* OutputBytes(int device, int64_t bytes, const char* name);

  std::vector<void*> allocations_;
  std::vector<std::pair<void*, size_t>> outputs_;
};

// `size` elements of device memory.
Tensor Download(const void* memory, int64_t size, DType dtype);

// A rank's gradients in device memory. Null weights' gradients: there are none.
struct DeviceGradients {
  struct Weights {
    const void *gate, *up, *down;
  };
  const void *d_x, *d_topk_weight, *d_shared_scale;
  Weights routed, shared;
  DType dtype;  // of the weights' gradients
};
// Joins the ranks' gradients; `out` is left empty.
LayerResult DownloadGradients(const LayerSpec& spec, const std::vector<DeviceGradients>& ranks);

}  // namespace mok::testing
