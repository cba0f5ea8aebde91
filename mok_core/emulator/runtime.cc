// The emulator's backend of the host seam (mok_core/device/runtime.h).
#include "mok_core/device/runtime.h"

#include <cstring>

#include "mok_core/argument_checks.h"
#include "mok_core/emulator/emulator.h"
#include "mok_core/emulator/tensor_map.h"

namespace mok::runtime {

StatusOr<int> DeviceCount() { return emulator::kMaxDevices; }

StatusOr<DeviceProperties> QueryDevice(int device) {
  MOK_RETURN_IF_ERROR(CheckRange("device", device, 0, emulator::kMaxDevices - 1));
  const emulator::Options& options = emulator::CurrentOptions();
  return DeviceProperties{options.processors_per_device, options.compute_major,
                          options.compute_minor};
}

StatusOr<void*> AllocateDevice(int device, size_t bytes, const char* name) {
  void* pointer = emulator::AllocateDevice(device, bytes, name);
  if (pointer != nullptr) return pointer;
  return ResourceExhaustedError("emulated device ", device, " has no ", bytes, " bytes for ", name);
}

StatusOr<void*> AllocateMappedHost(size_t bytes, const char* name) {
  void* pointer = emulator::AllocateHost(bytes, name);
  if (pointer == nullptr) {
    return ResourceExhaustedError("the emulator has no ", bytes, " bytes of host memory for ",
                                  name);
  }
  std::memset(pointer, 0, bytes);
  emulator::MarkInitialized(pointer, bytes);
  return pointer;
}

Status Free(void* pointer) {
  if (pointer == nullptr || emulator::Free(pointer)) return OkStatus();
  return InvalidArgumentError(pointer, " is not the start of a live allocation");
}

Status EnablePeerAccess(int device, int peer) {
  emulator::EnablePeerAccess(device, peer);
  return OkStatus();
}

Status CopyToDevice(void* device, const void* host, size_t bytes) {
  std::memcpy(device, host, bytes);
  emulator::MarkInitialized(device, bytes);
  return OkStatus();
}

Status CopyToHost(void* host, const void* device, size_t bytes) {
  std::memcpy(host, device, bytes);
  return OkStatus();
}

Status Fill(void* device, unsigned char value, size_t bytes) {
  std::memset(device, value, bytes);
  emulator::MarkInitialized(device, bytes);
  return OkStatus();
}

StatusOr<void*> CreateStream(int /*device*/) {
  static char* next = nullptr;  // streams are told apart by their address only
  return static_cast<void*>(next += 16);
}

Status Synchronize() {
  const emulator::Report report = emulator::Run();
  if (report.ok) return OkStatus();
  return InternalError("emulator: ", report.kind, ": ", report.text);
}

StatusOr<TensorMap> EncodeTensorMap(const TensorMapSpec& spec) {
  MOK_RETURN_IF_ERROR(ValidateTensorMapSpec(spec));
  emulator::TensorMapContents contents{};
  contents.magic = emulator::kTensorMapMagic;
  contents.base = static_cast<char*>(spec.base);
  contents.rank = static_cast<uint8_t>(spec.rank);
  contents.element_bytes = static_cast<uint8_t>(spec.element_bytes);
  contents.swizzle = static_cast<int16_t>(spec.swizzle);
  for (int i = 0; i < spec.rank; ++i) {
    contents.dimensions[i] = spec.dimensions[i];
    contents.box[i] = static_cast<uint16_t>(spec.box[i]);
    if (i > 0) contents.strides[i - 1] = spec.strides[i - 1];
  }
  TensorMap map{};
  std::memcpy(&map, &contents, sizeof contents);
  return map;
}

Status LaunchKernelAddress(const void* kernel, const LaunchConfig& config, const void* parameters,
                           size_t parameter_bytes) {
  if (config.shared_bytes > emulator::kMaxSharedBytes) {
    return InvalidArgumentError(config.name, ": ", config.shared_bytes,
                                " bytes of shared memory exceed ", emulator::kMaxSharedBytes);
  }
  if (config.device < 0 || config.device >= emulator::kMaxDevices) {
    return InvalidArgumentError(config.name, ": no device ", config.device);
  }
  const Index3 &grid = config.grid, &cluster = config.cluster;
  if (grid.x % cluster.x != 0 || grid.y % cluster.y != 0 || grid.z % cluster.z != 0) {
    return InvalidArgumentError(config.name, ": the grid is not a multiple of the cluster");
  }
  emulator::GridOptions options;
  options.grid = config.grid;
  options.block = config.block;
  options.cluster = config.cluster;
  options.shared_bytes = config.shared_bytes;
  options.registers_per_thread = config.registers_per_thread;
  options.device = config.device;
  options.stream = reinterpret_cast<int64_t>(config.stream);
  options.name = config.name;
  // A kernel takes a reference to its parameters, which is passed like their address.
  emulator::QueueGrid(options, reinterpret_cast<void (*)(const void*)>(kernel), parameters,
                      parameter_bytes);
  return OkStatus();
}

}  // namespace mok::runtime

namespace mok::emulator {

void ForceTensorMapSwizzle(void* map, Swizzle swizzle) {
  static_cast<TensorMapContents*>(map)->swizzle = static_cast<int16_t>(swizzle);
}

}  // namespace mok::emulator
