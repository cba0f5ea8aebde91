// The instantiations of a kernel template over its planted bugs.
#pragma once

#include <utility>

// The address of kernel<bug>, bug < count. nvcc compiles the correct kernel only.
#if defined(MOK_EMULATOR)
#define MOK_KERNEL_TABLE(kernel, count, bug)                                            \
  []<int... kBugs>(int index, std::integer_sequence<int, kBugs...>)->const void* {      \
    const void* const addresses[] = {reinterpret_cast<const void*>(&kernel<kBugs>)...}; \
    return addresses[index];                                                            \
  }                                                                                     \
  (bug, std::make_integer_sequence<int, count>())
#else
#define MOK_KERNEL_TABLE(kernel, count, bug) \
  ((bug) == 0 ? reinterpret_cast<const void*>(&kernel<0>) : nullptr)
#endif
