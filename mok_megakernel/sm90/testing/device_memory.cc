#include "mok_megakernel/sm90/testing/device_memory.h"

#include <algorithm>

#include "mok_core/device/runtime.h"

namespace mok::testing {

DeviceMemory::~DeviceMemory() {
  for (void* allocation : allocations_) MustSucceed(runtime::Free(allocation));
}

void* DeviceMemory::Allocate(int device, int64_t bytes, const char* name) {
  const auto size = static_cast<size_t>(std::max<int64_t>(bytes, 256));
  StatusOr<void*> memory = runtime::AllocateDevice(device, size, name);
  MOK_CHECK(memory.ok()) << memory.status();
  allocations_.push_back(memory.value());
  return memory.value();
}

void* DeviceMemory::AllocateZeroed(int device, int64_t bytes, const char* name) {
  void* memory = Allocate(device, bytes, name);
  if (bytes > 0) MustSucceed(runtime::Fill(memory, 0, static_cast<size_t>(bytes)));
  return memory;
}

void* DeviceMemory::AllocateMappedBytes(size_t bytes, const char* name) {
  StatusOr<void*> memory = runtime::AllocateMappedHost(bytes, name);
  MOK_CHECK(memory.ok()) << memory.status();
  allocations_.push_back(memory.value());
  return memory.value();
}

void* DeviceMemory::UploadBytes(int device, const void* values, int64_t bytes, const char* name) {
  void* memory = Allocate(device, bytes, name);
  if (bytes > 0) {
    MustSucceed(runtime::CopyToDevice(memory, values, static_cast<size_t>(bytes)));
  }
  return memory;
}

void* DeviceMemory::OutputBytes(int device, int64_t bytes, const char* name) {
  void* memory = Allocate(device, bytes, name);
  if (bytes > 0) outputs_.emplace_back(memory, static_cast<size_t>(bytes));
  return memory;
}

void DeviceMemory::Poison() const {
  for (const auto& [memory, bytes] : outputs_) MustSucceed(runtime::Fill(memory, 0xFF, bytes));
}

Tensor Download(const void* memory, int64_t size, DType dtype) {
  Tensor tensor(dtype, size);
  if (size > 0) MustSucceed(runtime::CopyToHost(tensor.At(0), memory, tensor.bytes.size()));
  return tensor;
}

LayerResult DownloadGradients(const LayerSpec& spec, const std::vector<DeviceGradients>& ranks) {
  LayerResult result;
  result.d_x = Tensor(DType::kBf16, 0);
  result.d_topk_weight = result.d_shared_scale = Tensor(DType::kFp32, 0);
  result.d_gate = result.d_up = result.d_down = Tensor(ranks.at(0).dtype, 0);
  for (size_t index = 0; index < ranks.size(); ++index) {
    const DeviceGradients& from = ranks[index];
    const int64_t tokens = spec.tokens[index];
    result.d_x.Append(Download(from.d_x, tokens * spec.hidden, DType::kBf16));
    result.d_topk_weight.Append(Download(from.d_topk_weight, tokens * spec.topk, DType::kFp32));
    if (spec.shared_scale) {
      result.d_shared_scale.Append(Download(from.d_shared_scale, tokens, DType::kFp32));
    }
    const int64_t routed = spec.experts[index] * spec.hidden * spec.intermediate;
    if (from.routed.gate != nullptr) {
      result.d_gate.Append(Download(from.routed.gate, routed, from.dtype));
      result.d_up.Append(Download(from.routed.up, routed, from.dtype));
      result.d_down.Append(Download(from.routed.down, routed, from.dtype));
    }
    const int64_t shared = spec.hidden * spec.shared_intermediate;
    if (shared == 0 || from.shared.gate == nullptr) continue;
    result.d_shared_gate.push_back(Download(from.shared.gate, shared, from.dtype));
    result.d_shared_up.push_back(Download(from.shared.up, shared, from.dtype));
    result.d_shared_down.push_back(Download(from.shared.down, shared, from.dtype));
  }
  return result;
}

}  // namespace mok::testing
