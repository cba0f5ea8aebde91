// Matrix operands as tensor cores see them: shared memory through a descriptor.
#pragma once

#include <cstdint>

#include "mok_core/device/descriptor.h"
#include "mok_core/emulator/engine.h"

namespace mok::emulator {

// A shared-memory matrix descriptor, decoded. Offsets in bytes.
struct OperandDescriptor {
  uint32_t start, leading, stride;
  int swizzle;
  OperandMajor major;
};

enum class OperandArchitecture { kSm90, kSm100 };
enum class ElementFormat { kBf16, kFp16, kE4m3, kE5m2, kE2m1 };

OperandDescriptor DecodeDescriptor(uint64_t descriptor, OperandArchitecture architecture,
                                   OperandMajor major = OperandMajor::kK);

// Shared offset of a 16-byte chunk of an operand that is one instruction deep. K-major: chunk
// `chunk` (0 or 1, of 32 bytes) of row `row`. MN-major, swizzled: elements 8 chunk .. 8 chunk + 7
// along M or N at depth `row` (0 to 15) of K. PTX ISA 8.8 section 9.7.15, canonical layouts.
uint32_t OperandOffset(const OperandDescriptor& descriptor, int row, int chunk);

// How an operand is read: by whom, knowing what.
struct OperandReader {
  Block* block;
  const Clock* clock;
  Access access;
  const char* what;
};

// Reads `rows` x K of an operand, where K is 16 (2-byte formats) or 32 (1-byte containers,
// K-major). output: [rows][16] per half of K, or transposed [K][leading_dimension]. scales: per
// row, or null.
struct OperandOutput {
  float* values;
  bool transposed;
  int leading_dimension;
};
void LoadOperand(const OperandReader& reader, const OperandDescriptor& descriptor, int rows,
                 ElementFormat format, const float* scales, const OperandOutput& output);

// c[m][n] += a[m][16] * b[16][n], in fp32, k ascending. The tensor core's own rounding (wider
// products, truncated sums) is not modelled: results agree when all partial sums are exact.
void MultiplyAccumulate(float* c, const float* a, const float* b, int m, int n);

}  // namespace mok::emulator
