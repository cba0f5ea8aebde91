// Compiler-dependent markers shared by host and device code.
#pragma once

#include <cstddef>

// Marks a function that both the host compiler and nvcc's device pass may instantiate.
#if defined(__CUDACC__)
#define MOK_HOST_DEVICE __host__ __device__
#else
#define MOK_HOST_DEVICE
#endif

// Before a loop in code that a GPU runs once: short code matters more than its speed there, since
// every line of it is fetched from far away.
#if defined(__CUDA_ARCH__)
#define MOK_NO_UNROLL _Pragma("unroll 1")
#else
#define MOK_NO_UNROLL
#endif

#define MOK_CONCATENATE_IMPL(a, b) a##b
#define MOK_CONCATENATE(a, b) MOK_CONCATENATE_IMPL(a, b)

namespace mok {

// Size of a coherence granule. State written by different threads sits this far apart, so that one
// writer does not take the line from under another.
inline constexpr size_t kCacheLineBytes = 64;

}  // namespace mok
