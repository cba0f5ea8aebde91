// Which tasks of an exchange queue are a warp's; shared by host and device code.
#pragma once

#include <cstdint>

#include "mok_core/macros.h"

namespace mok {

// `step` seats share the `count` tasks of a queue round robin. From `tail` on, a multiple of the
// step, every seat is two warps, which take turns.
struct SeatTasks {
  int32_t first, step;  // first < step: of the seat
  int32_t half;  // in the tail: 0 for the warp of the seat, 1 for the one that joins it there
  int64_t tail, count;

  MOK_HOST_DEVICE int64_t begin() const { return half == 0 ? 0 : tail / step; }
  // The warp's n-th task, n >= begin(), ascending; none if not less than `count`.
  MOK_HOST_DEVICE int64_t At(int64_t n) const {
    const int64_t index = n * step;
    return first + (index < tail ? index : index + index - tail + int64_t{half} * step);
  }
};

// The tail that makes the two warps of a seat share at most two rounds, and no more than the last
// `most` <= count tasks but for rounding.
MOK_HOST_DEVICE inline int64_t TailOfQueue(int64_t count, int64_t most, int32_t step) {
  const int64_t two_rounds = 2 * int64_t{step};
  const int64_t begin = count - (most < two_rounds ? most : two_rounds) + step - 1;
  return begin - static_cast<uint32_t>(begin) % static_cast<uint32_t>(step);
}
// The tail of a queue whose seats are one warp each.
MOK_HOST_DEVICE inline int64_t NoTailOfQueue(int64_t count, int32_t step) {
  return TailOfQueue(count, 0, step);
}

}  // namespace mok
