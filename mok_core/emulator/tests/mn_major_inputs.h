// Inputs of the kernels of mn_major_sm90, shared by their test and the validation against the GPU.
#pragma once

#include "mok_core/emulator/tests/mn_major_sm90.h"
#include "mok_core/emulator/tests/test_support.h"

namespace mok::testing {

struct MnMajorCase {
  mn_major::Params params;
  std::vector<float> expected;  // c
};

// The map of an operand [size, kDepth], or, MN-major, of its transpose.
inline TensorMap MnMajorOperandMap(const std::vector<uint16_t>& values, int size,
                                   OperandMajor major, Swizzle swizzle) {
  constexpr int kDepth = mn_major::kDepth;
  std::vector<uint16_t> stored = values;
  const bool is_mn = major == OperandMajor::kMn;
  for (int i = 0; is_mn && i < size; ++i) {
    for (int k = 0; k < kDepth; ++k) stored[k * size + i] = values[i * kDepth + k];
  }
  runtime::TensorMapSpec spec{};
  spec.base = DeviceArray(stored, "operand");
  spec.element_bytes = 2;
  spec.rank = 2;
  spec.dimensions[0] = is_mn ? size : kDepth;
  spec.dimensions[1] = is_mn ? kDepth : size;
  spec.strides[0] = spec.dimensions[0] * 2;
  spec.box[0] = static_cast<uint32_t>(swizzle) / 2;
  spec.box[1] = static_cast<uint32_t>(spec.dimensions[1]);
  spec.swizzle = swizzle;
  return runtime::EncodeTensorMap(spec).value();
}

inline MnMajorCase MakeMnMajorCase(const mn_major::Form& form) {
  using namespace mn_major;
  const std::vector<uint16_t> a = ExactBFloat16(kRows * kDepth, 21);
  const std::vector<uint16_t> b = ExactBFloat16(kColumns * kDepth, 22);
  MnMajorCase test;
  test.params.a = MnMajorOperandMap(a, kRows, form.major_a, form.swizzle);
  test.params.b = MnMajorOperandMap(b, kColumns, form.major_b, form.swizzle);
  test.params.c = UninitializedArray<float>(kRows * kColumns, "c");
  test.expected = ExactProduct(a, b, kRows, kColumns, kDepth);
  return test;
}

}  // namespace mok::testing
