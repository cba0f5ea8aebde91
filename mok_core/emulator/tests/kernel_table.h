// The instantiations of a kernel template over its planted bugs.
#pragma once

#include <utility>

// The address of kernel<bug>, bug < count. nvcc compiles the correct kernel only.
#if defined(MOK_EMULATOR)
#define MOK_KERNEL_ADDRESS(kernel) reinterpret_cast<const void*>(&kernel)
#define MOK_KERNEL_TABLE(kernel, count, bug)                                    \
  [](int index) {                                                               \
    auto select = [index]<int... kBugs>(std::integer_sequence<int, kBugs...>) { \
      const void* const addresses[] = {MOK_KERNEL_ADDRESS(kernel<kBugs>)...};   \
      return addresses[index];                                                  \
    };                                                                          \
    return select(std::make_integer_sequence<int, count>());                    \
  }(bug)
#else
#define MOK_KERNEL_TABLE(kernel, count, bug) \
  ((bug) == 0 ? reinterpret_cast<const void*>(&kernel<0>) : nullptr)
#endif
