// What the CUDA backend leaves behind when it fails. On a machine without a GPU everything fails,
// and CUDA's last error is that there is none, whatever happens.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <thread>

#include "mok_core/device/runtime.h"

namespace mok::runtime {
namespace {

constexpr int kNoDevice = 1 << 20;

// The error is in the Status. A program that asks CUDA after its own calls does not find it there.
TEST(RuntimeCudaTest, ErrorsDoNotStayInTheRuntime) {
  const cudaError_t before = cudaPeekAtLastError();
  EXPECT_TRUE(DeviceCount().ok());
  EXPECT_EQ(cudaPeekAtLastError(), before) << "DeviceCount";
  EXPECT_FALSE(AllocateDevice(kNoDevice, 16, "memory").ok());
  EXPECT_EQ(cudaPeekAtLastError(), before) << "AllocateDevice";
  EXPECT_FALSE(QueryDevice(kNoDevice).ok());
  EXPECT_EQ(cudaPeekAtLastError(), before) << "QueryDevice";
  EXPECT_FALSE(EnablePeerAccess(0, kNoDevice).ok());
  EXPECT_EQ(cudaPeekAtLastError(), before) << "EnablePeerAccess";
  char memory[16] = {};
  EXPECT_FALSE(CopyToHost(memory, memory, sizeof memory).ok());
  EXPECT_EQ(cudaPeekAtLastError(), before) << "CopyToHost";
  EXPECT_FALSE(LaunchKernelAddress(memory, {}, memory, sizeof memory).ok());
  EXPECT_EQ(cudaPeekAtLastError(), before) << "LaunchKernelAddress";
}

// A thread may encode maps before it calls anything that makes a context current, as autograd's
// threads do.
TEST(RuntimeCudaTest, AThreadsFirstCallMayEncodeAMap) {
  const int devices = DeviceCount().value();
  void* const memory = devices > 0 ? AllocateDevice(0, 4096, "memory").value() : nullptr;
  alignas(4096) static char host_memory[4096];
  TensorMapSpec spec{};
  spec.base = devices > 0 ? memory : host_memory;
  spec.element_bytes = 2;
  spec.rank = 2;
  spec.dimensions[0] = spec.dimensions[1] = 32;
  spec.strides[0] = 64;
  spec.box[0] = spec.box[1] = 8;
  bool encoded = false;
  std::thread([&] { encoded = EncodeTensorMap(spec).ok(); }).join();
  EXPECT_EQ(encoded, devices > 0);
}

}  // namespace
}  // namespace mok::runtime
