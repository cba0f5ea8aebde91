#include "mok_core/argument_checks.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace mok {
namespace {

TEST(ArgumentChecksTest, NumbersInsideTheirRangePass) {
  for (const int64_t value : {-1, 0, 7}) EXPECT_EQ(CheckRange("n", value, -1, 7), OkStatus());
  for (const int64_t value : {8, 16, 2147483640}) {
    EXPECT_EQ(CheckMultiple("n", value, 8, 8), OkStatus());
  }
  EXPECT_EQ(CheckMultiple("n", 0, 0, 8), OkStatus());
}

TEST(ArgumentChecksTest, ErrorsNameArgumentExpectedAndActual) {
  EXPECT_EQ(CheckRange("layer.n", -2, -1, 7),
            InvalidArgumentError("layer.n: expected -1 to 7, got -2"));
  EXPECT_EQ(CheckRange("n", 8, -1, 7), InvalidArgumentError("n: expected -1 to 7, got 8"));
  for (const int64_t value : {int64_t{0}, int64_t{12}, int64_t{1} << 31}) {
    EXPECT_EQ(CheckMultiple("n", value, 8, 8),
              InvalidArgumentError("n: expected a multiple of 8 from 8 to 2^31 - 1, got ", value));
  }
  EXPECT_EQ(CheckPointer("p", nullptr), InvalidArgumentError("p: expected a pointer, got null"));
}

TEST(ArgumentChecksTest, Alignment) {
  alignas(16) char memory[16] = {};
  EXPECT_EQ(CheckPointer("p", memory + 1), OkStatus());
  EXPECT_EQ(CheckAligned("p", memory, 16), OkStatus());
  EXPECT_EQ(CheckAligned("p", memory + 4, 4), OkStatus());
  EXPECT_EQ(CheckAligned("p", nullptr, 16), NullPointer("p"));
  const void* odd = memory + 8;
  EXPECT_EQ(CheckAligned("p", odd, 16),
            InvalidArgumentError("p: expected an address aligned to 16 bytes, got ", odd));
}

}  // namespace
}  // namespace mok
