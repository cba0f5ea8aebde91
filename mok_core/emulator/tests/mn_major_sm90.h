// wgmma with every combination of K-major and MN-major operands, and every swizzle.
#pragma once

#include "mok_core/device/descriptor.h"
#include "mok_core/device/types.h"
#include "mok_core/emulator/tests/test_kernel.h"

namespace mok::testing::mn_major {

constexpr int kRows = 64, kColumns = 128, kDepth = 64;

// How the operands lie in global and in shared memory: K-major [M or N, K], MN-major [K, M or N].
struct Form {
  OperandMajor major_a, major_b;
  Swizzle swizzle;
};

inline constexpr Form kForms[] = {
    {OperandMajor::kK, OperandMajor::kK, Swizzle::k128},
    {OperandMajor::kK, OperandMajor::kMn, Swizzle::k128},
    {OperandMajor::kMn, OperandMajor::kK, Swizzle::k128},
    {OperandMajor::kMn, OperandMajor::kMn, Swizzle::k128},
    {OperandMajor::kK, OperandMajor::kMn, Swizzle::k64},
    {OperandMajor::kMn, OperandMajor::kMn, Swizzle::k64},
    {OperandMajor::kMn, OperandMajor::kK, Swizzle::k32},
    {OperandMajor::kMn, OperandMajor::kMn, Swizzle::k32},
};
constexpr int kNumForms = sizeof kForms / sizeof kForms[0];

enum Bug {
  kCorrect,
  kNotTransposedA,
  kNotTransposedB,
  kLeadingAndStrideSwapped,
  kWrongLeading,
  kWrongStride,
  kWrongStep,
  kWrongSwizzle,
  kNoSwizzle,
  kLastBoxMissing,
  kBugCount
};

struct Params {
  TensorMap a, b;  // bf16; boxes of one swizzle span by 64
  float* c;        // [kRows, kColumns]
};

// One block: c = A B^T.
TestKernel FormKernel(int form);
// The form with both operands MN-major and 128-byte swizzle.
TestKernel BuggyKernel(int bug);

}  // namespace mok::testing::mn_major
