// The memory that a call of the C APIs is given: sizes that no machine has, and overlaps that would
// spoil results. One rule for all calls: what they only read may overlap, what they write may not
// overlap anything. Some overlaps would do no harm in today's order of tasks (out that is x), but
// no order is promised.
#pragma once

#include <array>
#include <cstdint>

#include "mok_core/status.h"

namespace mok {

// 32 TiB. Products of fewer sizes than overflow int64, and sums of such products, stay far below
// 2^63 if no single tensor takes more.
inline constexpr int64_t kMostTensorBytes = int64_t{1} << 45;

struct MatrixSize {
  int64_t rows, columns, element_bytes;
};

// Memory without rows.
constexpr MatrixSize BytesOf(int64_t bytes) { return {1, bytes, 1}; }

// kInvalidArgument, naming the tensor, unless it takes 0 to kMostTensorBytes.
Status CheckTensorSize(const char* name, const MatrixSize& size);

// All memory of one call. Null pointers stand for absent tensors.
class CallMemory {
 public:
  // Names outlive the object.
  void Reads(const char* name, const void* data, const MatrixSize& size);
  void Writes(const char* name, const void* data, const MatrixSize& size);

  // kInvalidArgument: the first tensor of a size that no machine has, else the first two of which
  // one is written and that overlap.
  Status Check() const;

 private:
  struct Range {
    const char* name;
    uintptr_t begin;
    uintptr_t bytes;
    bool is_written;
  };
  // Heaps of all ranks are the most that any call has.
  static constexpr int kMostRanges = 80;

  void Add(const char* name, const void* data, const MatrixSize& size, bool is_written);

  std::array<Range, kMostRanges> ranges_;
  int num_ranges_ = 0;
  Status first_error_;
};

}  // namespace mok
