// A five-point average on a grid that is a torus.
#pragma once

#include <cstdint>

#include "mok_core/view.h"

namespace custom_kernel {

// The three rows that one output row reads, each [columns].
struct StencilRows {
  const float* above = nullptr;
  const float* here = nullptr;
  const float* below = nullptr;
  int64_t columns = 0;
};

// Element `column` of the output row. The order of the additions is part of the result.
inline float AverageAt(const StencilRows& rows, int64_t column) {
  const int64_t left = column == 0 ? rows.columns - 1 : column - 1;
  const int64_t right = column == rows.columns - 1 ? 0 : column + 1;
  const float vertical = rows.above[column] + rows.below[column];
  const float horizontal = rows.here[left] + rows.here[right];
  return 0.2f * (rows.here[column] + (vertical + horizontal));
}

// `steps` updates of the whole grid by one thread: what any split over ranks has to reproduce.
// `scratch` has the grid's shape; the result is in `grid`.
inline void RunSerially(const mok::MatrixView<float>& grid, const mok::MatrixView<float>& scratch,
                        int64_t steps) {
  for (int64_t step = 0; step < steps; ++step) {
    for (int64_t row = 0; row < grid.rows; ++row) {
      const StencilRows rows{grid.Row((row + grid.rows - 1) % grid.rows), grid.Row(row),
                             grid.Row((row + 1) % grid.rows), grid.columns};
      for (int64_t column = 0; column < grid.columns; ++column) {
        scratch(row, column) = AverageAt(rows, column);
      }
    }
    for (int64_t row = 0; row < grid.rows; ++row) {
      for (int64_t column = 0; column < grid.columns; ++column) {
        grid(row, column) = scratch(row, column);
      }
    }
  }
}

}  // namespace custom_kernel
