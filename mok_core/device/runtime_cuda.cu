// The CUDA backend of the host seam. The driver's entry points are looked up at run time, so that
// nothing links libcuda.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "mok_core/device/runtime.h"

namespace mok::runtime {
namespace {

// The error becomes a Status alone: a program that links MoK and asks cudaGetLastError() after its
// own calls must not find it there.
Status FromCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return OkStatus();
  (void)cudaGetLastError();
  const StatusCode code = error == cudaErrorMemoryAllocation ? StatusCode::kResourceExhausted
                          : error == cudaErrorNoDevice       ? StatusCode::kUnavailable
                                                             : StatusCode::kInternal;
  return Status(code, StrCat(what, ": ", cudaGetErrorString(error)));
}

// Restores the caller's current device. It usually is the one: no call to the driver then.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : status_(Switch(device)) {}
  ~DeviceGuard() {
    if (has_switched_) (void)FromCuda(cudaSetDevice(previous_), "cudaSetDevice");
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  const Status& status() const { return status_; }

 private:
  Status Switch(int device) {
    MOK_RETURN_IF_ERROR(FromCuda(cudaGetDevice(&previous_), "cudaGetDevice"));
    if (previous_ == device) return OkStatus();
    MOK_RETURN_IF_ERROR(FromCuda(cudaSetDevice(device), "cudaSetDevice"));
    has_switched_ = true;
    return OkStatus();
  }

  int previous_ = 0;
  bool has_switched_ = false;
  Status status_;  // last: made by Switch, which sets the others
};

// Lets the kernel have so much dynamic shared memory on the current device, once.
Status AllowSharedMemory(const void* kernel, int device, size_t bytes) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, size_t> allowed;
  const std::lock_guard<std::mutex> lock(mutex);
  size_t& known = allowed[{kernel, device}];
  if (known >= bytes) return OkStatus();
  MOK_RETURN_IF_ERROR(
      FromCuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(bytes)),
               "cudaFuncSetAttribute"));
  known = bytes;
  return OkStatus();
}

// A stream of the current device on which copies follow nothing but each other: the default stream
// would wait for all work on streams that are not created as non-blocking.
StatusOr<cudaStream_t> CopyStream(int device) {
  static std::mutex mutex;
  static std::map<int, cudaStream_t> streams;
  const std::lock_guard<std::mutex> lock(mutex);
  cudaStream_t& stream = streams[device];
  if (stream == nullptr) {
    MOK_RETURN_IF_ERROR(FromCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                                 "cudaStreamCreateWithFlags"));
  }
  return stream;
}

// Runs a call with the device current that owns the memory, whatever the caller's is.
template <class Call>
Status OnDeviceOf(const void* memory, Call call) {
  cudaPointerAttributes attributes;
  MOK_RETURN_IF_ERROR(
      FromCuda(cudaPointerGetAttributes(&attributes, memory), "cudaPointerGetAttributes"));
  if (attributes.type == cudaMemoryTypeUnregistered) {
    return InvalidArgumentError(memory, " is neither device nor mapped host memory");
  }
  DeviceGuard guard(attributes.device);
  MOK_RETURN_IF_ERROR(guard.status());
  return call(attributes);
}

// Queues a call on the copy stream of the device that owns the memory, and waits for it.
template <class Call>
Status CopyOnDeviceOf(const void* memory, const char* what, Call call) {
  return OnDeviceOf(memory, [&](const cudaPointerAttributes& attributes) {
    MOK_ASSIGN_OR_RETURN(const cudaStream_t stream, CopyStream(attributes.device));
    MOK_RETURN_IF_ERROR(FromCuda(call(stream), what));
    return FromCuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  });
}

StatusOr<PFN_cuTensorMapEncodeTiled_v12000> TensorMapEncoder() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  MOK_RETURN_IF_ERROR(FromCuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                                12000, cudaEnableDefault, &found),
                               "cudaGetDriverEntryPointByVersion"));
  if (found != cudaDriverEntryPointSuccess || entry == nullptr) {
    return UnavailableError("the CUDA driver has no cuTensorMapEncodeTiled (needs 12.0 or newer)");
  }
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
}

// Makes the context of the thread's current device current, in a thread that has called nothing of
// CUDA's runtime yet, which would have done so: the driver's own functions do not.
Status EnterContext() {
  int device = 0;
  MOK_RETURN_IF_ERROR(FromCuda(cudaGetDevice(&device), "cudaGetDevice"));
  return FromCuda(cudaSetDevice(device), "cudaSetDevice");
}

CUtensorMapDataType DataType(int element_bytes) {
  return element_bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
         : element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                              : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
}

CUtensorMapSwizzle SwizzleMode(Swizzle swizzle) {
  return swizzle == Swizzle::k128  ? CU_TENSOR_MAP_SWIZZLE_128B
         : swizzle == Swizzle::k64 ? CU_TENSOR_MAP_SWIZZLE_64B
         : swizzle == Swizzle::k32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                   : CU_TENSOR_MAP_SWIZZLE_NONE;
}

}  // namespace

StatusOr<int> DeviceCount() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver) {
    (void)cudaGetLastError();
    return 0;
  }
  MOK_RETURN_IF_ERROR(FromCuda(error, "cudaGetDeviceCount"));
  return count;
}

StatusOr<DeviceProperties> QueryDevice(int device) {
  const auto query = [device](cudaDeviceAttr attribute, int* value) {
    return FromCuda(cudaDeviceGetAttribute(value, attribute, device), "cudaDeviceGetAttribute");
  };
  DeviceProperties properties = {};
  MOK_RETURN_IF_ERROR(query(cudaDevAttrMultiProcessorCount, &properties.num_multiprocessors));
  MOK_RETURN_IF_ERROR(query(cudaDevAttrComputeCapabilityMajor, &properties.compute_major));
  MOK_RETURN_IF_ERROR(query(cudaDevAttrComputeCapabilityMinor, &properties.compute_minor));
  return properties;
}

StatusOr<void*> AllocateDevice(int device, size_t bytes, const char* name) {
  DeviceGuard guard(device);
  MOK_RETURN_IF_ERROR(guard.status());
  void* pointer = nullptr;
  MOK_RETURN_IF_ERROR(FromCuda(cudaMalloc(&pointer, bytes),
                               StrCat("cudaMalloc of ", bytes, " for ", name).c_str()));
  return pointer;
}

StatusOr<void*> AllocateMappedHost(size_t bytes, const char* name) {
  void* pointer = nullptr;
  MOK_RETURN_IF_ERROR(
      FromCuda(cudaHostAlloc(&pointer, bytes, cudaHostAllocPortable | cudaHostAllocMapped),
               StrCat("cudaHostAlloc of ", bytes, " for ", name).c_str()));
  std::memset(pointer, 0, bytes);
  return pointer;
}

Status Free(void* pointer) {
  if (pointer == nullptr) return OkStatus();  // an allocation of no bytes
  return OnDeviceOf(pointer, [&](const cudaPointerAttributes& attributes) {
    return attributes.type == cudaMemoryTypeHost ? FromCuda(cudaFreeHost(pointer), "cudaFreeHost")
                                                 : FromCuda(cudaFree(pointer), "cudaFree");
  });
}

Status EnablePeerAccess(int device, int peer) {
  if (device == peer) return OkStatus();
  // CUDA answers a repeated call with an error, which tools report; it has no query.
  static std::mutex mutex;
  static std::set<std::pair<int, int>> enabled;
  const std::lock_guard<std::mutex> lock(mutex);
  if (enabled.contains({device, peer})) return OkStatus();
  int can_access = 0;
  MOK_RETURN_IF_ERROR(
      FromCuda(cudaDeviceCanAccessPeer(&can_access, device, peer), "cudaDeviceCanAccessPeer"));
  if (can_access == 0) {
    return UnavailableError("device ", device, " cannot access the memory of device ", peer);
  }
  DeviceGuard guard(device);
  MOK_RETURN_IF_ERROR(guard.status());
  const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();  // enabled by someone else; not sticky, but remembered
  } else {
    MOK_RETURN_IF_ERROR(FromCuda(error, "cudaDeviceEnablePeerAccess"));
  }
  enabled.insert({device, peer});
  return OkStatus();
}

Status CopyToDevice(void* device, const void* host, size_t bytes) {
  if (bytes == 0) return OkStatus();
  return CopyOnDeviceOf(device, "cudaMemcpyAsync", [&](cudaStream_t stream) {
    return cudaMemcpyAsync(device, host, bytes, cudaMemcpyDefault, stream);
  });
}

Status CopyToHost(void* host, const void* device, size_t bytes) {
  if (bytes == 0) return OkStatus();
  return CopyOnDeviceOf(device, "cudaMemcpyAsync", [&](cudaStream_t stream) {
    return cudaMemcpyAsync(host, device, bytes, cudaMemcpyDefault, stream);
  });
}

Status Fill(void* device, unsigned char value, size_t bytes) {
  if (bytes == 0) return OkStatus();
  return CopyOnDeviceOf(device, "cudaMemsetAsync", [&](cudaStream_t stream) {
    return cudaMemsetAsync(device, value, bytes, stream);
  });
}

StatusOr<void*> CreateStream(int device) {
  DeviceGuard guard(device);
  MOK_RETURN_IF_ERROR(guard.status());
  cudaStream_t stream = nullptr;
  MOK_RETURN_IF_ERROR(FromCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                               "cudaStreamCreateWithFlags"));
  return static_cast<void*>(stream);
}

Status Synchronize() {
  MOK_ASSIGN_OR_RETURN(const int count, DeviceCount());
  for (int device = 0; device < count; ++device) {
    DeviceGuard guard(device);
    MOK_RETURN_IF_ERROR(guard.status());
    MOK_RETURN_IF_ERROR(FromCuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"));
  }
  return OkStatus();
}

StatusOr<TensorMap> EncodeTensorMap(const TensorMapSpec& spec) {
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));
  MOK_RETURN_IF_ERROR(ValidateTensorMapSpec(spec));
  static const StatusOr<PFN_cuTensorMapEncodeTiled_v12000> encoder = TensorMapEncoder();
  MOK_RETURN_IF_ERROR(encoder);
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  cuuint64_t dimensions[5], strides[4];
  for (int i = 0; i < spec.rank; ++i) dimensions[i] = spec.dimensions[i];
  for (int i = 0; i + 1 < spec.rank; ++i) strides[i] = spec.strides[i];
  TensorMap map;
  const auto encode = [&] {
    return encoder.value()(reinterpret_cast<CUtensorMap*>(&map), DataType(spec.element_bytes),
                           static_cast<cuuint32_t>(spec.rank), spec.base, dimensions, strides,
                           spec.box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                           SwizzleMode(spec.swizzle), CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = encode();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    MOK_RETURN_IF_ERROR(EnterContext());
    result = encode();
  }
  if (result != CUDA_SUCCESS) {
    return InvalidArgumentError("cuTensorMapEncodeTiled: error ", static_cast<int>(result));
  }
  return map;
}

Status LaunchKernelAddress(const void* kernel, const LaunchConfig& config, const void* parameters,
                           size_t /*parameter_bytes*/) {
  DeviceGuard guard(config.device);
  MOK_RETURN_IF_ERROR(guard.status());
  MOK_RETURN_IF_ERROR(AllowSharedMemory(kernel, config.device, config.shared_bytes));
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(config.grid.x, config.grid.y, config.grid.z);
  launch.blockDim = dim3(config.block.x, config.block.y, config.block.z);
  launch.dynamicSmemBytes = config.shared_bytes;
  launch.stream = static_cast<cudaStream_t>(config.stream);
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeClusterDimension;
  attribute[0].val.clusterDim = {config.cluster.x, config.cluster.y, config.cluster.z};
  launch.attrs = attribute;
  launch.numAttrs = config.cluster.x * config.cluster.y * config.cluster.z > 1 ? 1 : 0;
  void* arguments[] = {const_cast<void*>(parameters)};
  return FromCuda(cudaLaunchKernelExC(&launch, kernel, arguments), config.name);
}

}  // namespace mok::runtime
