// What the CUDA backend leaves behind when it fails. On a machine without a GPU everything fails,
// and CUDA's last error is that there is none, whatever happens.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace mok::runtime
