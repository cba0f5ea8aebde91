// What host code needs to launch a test kernel.
#pragma once

#include <cstddef>

namespace mok::testing {

struct TestKernel {
  const void* address;
  unsigned threads;
  size_t shared_bytes;
};

}  // namespace mok::testing
