// Sizes that no machine has, and overlaps of the memory of one call.
#include "mok_megakernel/call_memory.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>

namespace mok {
namespace {

constexpr int64_t kMost = INT64_MAX;

const void* At(uintptr_t address) { return reinterpret_cast<const void*>(address); }

TEST(CheckTensorSizeTest, FindsWhatOverflows) {
  EXPECT_EQ(CheckTensorSize("x", {int64_t{1} << 40, 16, 2}), OkStatus());  // 2^45
  EXPECT_EQ(CheckTensorSize("x", {0, kMost, 4}), OkStatus());
  const auto refused = [](const MatrixSize& size) {
    return CheckTensorSize("x", size).code() == StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused({(int64_t{1} << 40) + 1, 16, 2}));
  EXPECT_TRUE(refused({int64_t{1} << 32, int64_t{1} << 32, 1}));  // 2^64 is 0 in 64 bits
  EXPECT_TRUE(refused({kMost, 1, 2}));
  EXPECT_TRUE(refused({-1, 8, 2}));
  EXPECT_TRUE(refused({-1, -8, 2}));
  EXPECT_EQ(CheckTensorSize("x", {kMost, 8, 2}).message(),
            "x: expected at most 2^45 bytes, got [9223372036854775807, 8] of 2 bytes");
}

// One written range [100, 120) and another.
Status WithOther(bool writes_other, uintptr_t begin, int64_t bytes) {
  CallMemory memory;
  memory.Writes("out", At(100), {2, 5, 2});
  writes_other ? memory.Writes("other", At(begin), BytesOf(bytes))
               : memory.Reads("other", At(begin), BytesOf(bytes));
  return memory.Check();
}

TEST(CallMemoryTest, WhatIsWrittenOverlapsNothing) {
  for (const bool writes : {false, true}) {
    EXPECT_EQ(WithOther(writes, 90, 10), OkStatus());
    EXPECT_EQ(WithOther(writes, 120, 10), OkStatus());
    EXPECT_EQ(WithOther(writes, 110, 0), OkStatus());
    EXPECT_EQ(WithOther(writes, 0, 200), OkStatus()) << "null";
    for (const auto& [begin, bytes] : {std::pair<uintptr_t, int64_t>{90, 11},
                                       {119, 1},
                                       {100, 20},
                                       {105, 3},
                                       {50, 100},
                                       {100, 1}}) {
      EXPECT_EQ(WithOther(writes, begin, bytes).code(), StatusCode::kInvalidArgument)
          << begin << ", " << bytes;
    }
  }
  EXPECT_EQ(WithOther(false, 110, 40).message(),
            "out: expected memory that does not overlap other, got 20 bytes at 0x64 and 40 at "
            "0x6e");
}

TEST(CallMemoryTest, WhatIsOnlyReadMayOverlap) {
  CallMemory memory;
  memory.Reads("gate", At(100), BytesOf(20));
  memory.Reads("up", At(100), BytesOf(20));
  EXPECT_EQ(memory.Check(), OkStatus());
  memory.Writes("d_gate", At(119), BytesOf(1));
  EXPECT_EQ(memory.Check().message(),
            "d_gate: expected memory that does not overlap gate, got 1 bytes at 0x77 and 20 at "
            "0x64");
}

// At the ends of the address space differences wrap.
TEST(CallMemoryTest, AddressesMayBeAnything) {
  CallMemory memory;
  memory.Writes("low", At(1), BytesOf(8));
  memory.Writes("high", At(~uintptr_t{0} - 7), BytesOf(8));
  EXPECT_EQ(memory.Check(), OkStatus());
}

TEST(CallMemoryTest, SizesComeFirst) {
  CallMemory memory;
  memory.Writes("out", At(100), BytesOf(20));
  memory.Reads("x", At(100), BytesOf(20));
  memory.Reads("gate", At(100), {kMost, 8, 2});
  EXPECT_EQ(memory.Check().message().rfind("gate: expected at most 2^45 bytes", 0), 0u);
}

}  // namespace
}  // namespace mok
