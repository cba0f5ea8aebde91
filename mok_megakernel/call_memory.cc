#include "mok_megakernel/call_memory.h"

namespace mok {
Status CheckTensorSize(const char* name, const MatrixSize& size) {
  int64_t elements = 0, bytes = 0;
  const bool overflows = __builtin_mul_overflow(size.rows, size.columns, &elements) ||
                         __builtin_mul_overflow(elements, size.element_bytes, &bytes);
  if (!overflows && size.rows >= 0 && size.columns >= 0 && bytes <= kMostTensorBytes) {
    return OkStatus();
  }
  return InvalidArgumentError(name, ": expected at most 2^45 bytes, got [", size.rows, ", ",
                              size.columns, "] of ", size.element_bytes, " bytes");
}

void CallMemory::Reads(const char* name, const void* data, const MatrixSize& size) {
  Add(name, data, size, false);
}

void CallMemory::Writes(const char* name, const void* data, const MatrixSize& size) {
  Add(name, data, size, true);
}

void CallMemory::Add(const char* name, const void* data, const MatrixSize& size, bool is_written) {
  if (data == nullptr || !first_error_.ok()) return;
  first_error_ = CheckTensorSize(name, size);
  if (!first_error_.ok()) return;
  const int64_t bytes = size.rows * size.columns * size.element_bytes;
  if (bytes == 0) return;
  MOK_CHECK(num_ranges_ < kMostRanges);
  ranges_[static_cast<size_t>(num_ranges_++)] = {name, reinterpret_cast<uintptr_t>(data),
                                                 static_cast<uintptr_t>(bytes), is_written};
}

Status CallMemory::Check() const {
  MOK_RETURN_IF_ERROR(first_error_);
  const auto address = [](const Range& range) { return reinterpret_cast<void*>(range.begin); };
  for (int i = 0; i < num_ranges_; ++i) {
    const Range& one = ranges_[static_cast<size_t>(i)];
    for (int j = 0; j < i; ++j) {
      const Range& other = ranges_[static_cast<size_t>(j)];
      if (!one.is_written && !other.is_written) continue;
      // Differences of addresses wrap where one begins behind the other, to more than any size.
      if (one.begin - other.begin >= other.bytes && other.begin - one.begin >= one.bytes) continue;
      const bool swap = !one.is_written;
      const Range& written = swap ? other : one;
      const Range& second = swap ? one : other;
      return InvalidArgumentError(written.name, ": expected memory that does not overlap ",
                                  second.name, ", got ", written.bytes, " bytes at ",
                                  address(written), " and ", second.bytes, " at ", address(second));
    }
  }
  return OkStatus();
}

}  // namespace mok
