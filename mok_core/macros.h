// Compiler-dependent markers shared by host and device code.
#pragma once

#include <cstddef>

// Marks a function that both the host compiler and nvcc's device pass may instantiate.
#if defined(__CUDACC__)
#define MOK_HOST_DEVICE __host__ __device__
#else
#define MOK_HOST_DEVICE
#endif

#define MOK_CONCATENATE_IMPL(a, b) a##b
#define MOK_CONCATENATE(a, b) MOK_CONCATENATE_IMPL(a, b)

namespace mok {

// Size of a coherence granule. State written by different threads sits this far apart, so that one
// writer does not take the line from under another.
inline constexpr size_t kCacheLineBytes = 64;

}  // namespace mok
