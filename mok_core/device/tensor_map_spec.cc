#include "mok_core/device/runtime.h"

namespace mok::runtime {

Status ValidateTensorMapSpec(const TensorMapSpec& spec) {
  if (spec.rank < 1 || spec.rank > 5) {
    return InvalidArgumentError("tensor map rank ", spec.rank, " is not in 1 to 5");
  }
  if (spec.element_bytes != 1 && spec.element_bytes != 2 && spec.element_bytes != 4) {
    return InvalidArgumentError("tensor map element_bytes ", spec.element_bytes,
                                " is not 1, 2 or 4");
  }
  // A map covers at least one element, so null is always a mistake.
  if (spec.base == nullptr) return InvalidArgumentError("tensor map base is null");
  if (reinterpret_cast<uintptr_t>(spec.base) % 16 != 0) {
    return InvalidArgumentError("tensor map base ", spec.base, " is not 16-byte aligned");
  }
  for (int i = 0; i < spec.rank; ++i) {
    if (spec.dimensions[i] < 1 || spec.dimensions[i] > uint64_t{1} << 32) {
      return InvalidArgumentError("tensor map dimension ", i, " is ", spec.dimensions[i]);
    }
    if (spec.box[i] < 1 || spec.box[i] > 256) {
      return InvalidArgumentError("tensor map box[", i, "] = ", spec.box[i], " is not in 1 to 256");
    }
    if (i > 0 && (spec.strides[i - 1] % 16 != 0 || spec.strides[i - 1] >= uint64_t{1} << 40)) {
      return InvalidArgumentError("tensor map stride of dimension ", i, " is ", spec.strides[i - 1],
                                  " bytes, not a multiple of 16 below 2^40");
    }
  }
  const uint32_t row_bytes = spec.box[0] * static_cast<uint32_t>(spec.element_bytes);
  if (row_bytes % 16 != 0) {
    return InvalidArgumentError("tensor map box row of ", row_bytes,
                                " bytes is not a multiple of 16");
  }
  const auto span = static_cast<uint32_t>(spec.swizzle);
  if (span != 0 && row_bytes > span) {
    return InvalidArgumentError("tensor map box row of ", row_bytes,
                                " bytes exceeds the swizzle span of ", span);
  }
  return OkStatus();
}

}  // namespace mok::runtime
