#pragma once

namespace mok::cuda_chain {

inline constexpr int kTileRows = 8;
inline constexpr int kTileColumns = 16;

// Index of element (row, column) in the swizzled tile, computed by CuTe on the host.
int SwizzledIndex(int row, int column);

// Copies a row-major kTileRows x kTileColumns tile of 4-byte elements from `source` into swizzled
// order at `destination` on the current device (device addresses). Returns a cudaError_t.
int CopyTileSwizzled(const float* source, float* destination);

}  // namespace mok::cuda_chain
