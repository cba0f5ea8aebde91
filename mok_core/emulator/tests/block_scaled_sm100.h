// One 128 x 128 x 256 multiply of E4M3 operands with E8M0 scales per 32 elements, for tests.
#pragma once

#include "mok_core/device/types.h"
#include "mok_core/emulator/tests/test_kernel.h"

namespace mok::testing::block_scaled {

constexpr int kM = 128, kN = 128, kK = 256;
constexpr int kStepK = 128, kSteps = kK / kStepK;
constexpr int kScaleBytes = 512;  // of one operand per step: the 128 x 4 blocked layout

enum Bug {
  kCorrect,
  kWrongScaleByte,
  kSwappedScales,
  kSecondCopyMissing,
  kScaleBytesMissing,
  kBugCount
};

struct Params {
  TensorMap a, b;                            // [128, 256] bytes each
  const unsigned char *scales_a, *scales_b;  // [kSteps, 512]
  float* d;                                  // [128, 128]
};

TestKernel BlockScaledKernel(int bug);

}  // namespace mok::testing::block_scaled
