#include "mok_core/emulator/tests/primitives_sm90.h"

#include <gmock/gmock.h>

#include <bit>
#include <cmath>

#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_core/emulator/tests/primitive_inputs.h"

namespace mok::testing {
namespace {

using ::testing::HasSubstr;

// What a load's box holds at element `index` of row `row`; rows count the outer dimensions.
uint16_t WantedElement(const LoadSpec& load, int row, int index) {
  int64_t place = load.coordinates[0] + index;
  if (place < 0 || place >= static_cast<int64_t>(load.dimensions[0])) return 0;
  for (int d = 1; d < load.rank; ++d) {
    const int64_t c = load.coordinates[d] + row % static_cast<int>(load.box[d]);
    row /= static_cast<int>(load.box[d]);
    if (c < 0 || c >= static_cast<int64_t>(load.dimensions[d])) return 0;
    place += c * static_cast<int64_t>(load.strides[d - 1]);
  }
  return SourceElement(place);
}

// Chunk number inside a row combined with the number of the 128-byte line.
int SwizzledByte(int byte, Swizzle swizzle) {
  const int chunks = static_cast<int>(swizzle) / 16 - 1;
  return byte ^ ((byte >> 7 & chunks) << 4);
}

TEST(PrimitivesSm90Test, TensorLoadsFillBoxes) {
  StartCase({1, 0.1});
  const CopyCase test = MakeCopyCase();
  MOK_CHECK(Launch(primitives::CopyKernel(), test.params, {}).ok());
  ASSERT_EQ(runtime::Synchronize(), OkStatus());
  const auto images = HostCopy(test.params.images, primitives::kLoads * primitives::kBoxBytes);
  for (int i = 0; i < primitives::kLoads; ++i) {
    const LoadSpec& load = kLoadSpecs[i];
    const int row_elements = static_cast<int>(load.box[0]);
    for (int e = 0; e < primitives::kBoxBytes / 2; ++e) {
      const int byte = i * primitives::kBoxBytes + SwizzledByte(e * 2, load.swizzle);
      const uint16_t got = static_cast<uint16_t>(images[byte] | images[byte + 1] << 8);
      ASSERT_EQ(got, WantedElement(load, e / row_elements, e % row_elements))
          << "load " << i << " element " << e;
    }
  }
}

TEST(PrimitivesSm90Test, TensorStoresClipBoxes) {
  StartCase({2, 0.1});
  const CopyCase test = MakeCopyCase();
  MOK_CHECK(Launch(primitives::CopyKernel(), test.params, {}).ok());
  ASSERT_EQ(runtime::Synchronize(), OkStatus());
  const auto stored_2d = HostCopy(test.stored_2d, kStoredElements);
  const auto stored_3d = HostCopy(test.stored_3d, kStoredElements);
  for (int row = 0; row < 40; ++row) {
    for (int column = 0; column < 72; ++column) {
      const int place = row * 72 + column;
      const int r2 = row - 30, c2 = column - 8;  // box at (8, 30)
      const bool in_2d = column < 64 && r2 >= 0 && r2 < 16 && c2 >= 0 && c2 < 64;
      const int want_2d = in_2d ? SwizzledByte((r2 * 64 + c2) * 2, Swizzle::k128) / 2 : 0xABCD;
      ASSERT_EQ(stored_2d[place], want_2d) << row << " " << column;
      const int c3 = column - 8, y = row % 5 - 2, z = row / 5 - 5;  // box at (8, 2, 5)
      const bool in_3d = column < 64 && c3 >= 0 && y >= 0 && y < 4 && z >= 0 && z < 4;
      const int want_3d = in_3d ? 0x8000 + (z * 4 + y) * 64 + c3 : 0xABCD;
      ASSERT_EQ(stored_3d[place], want_3d) << row << " " << column;
    }
  }
}

// What the hardware answers with a write outside the tensor or an illegal instruction.
TEST(PrimitivesSm90Test, TensorStoresKeepToTheTensorInUnitsOfSixteenBytes) {
  const auto message = [](auto change) {
    StartCase({2, 0.1});
    CopyCase test = MakeCopyCase();
    change(test);
    MOK_CHECK(Launch(primitives::CopyKernel(), test.params, {}).ok());
    return runtime::Synchronize().message();
  };
  for (const int store : {0, 1}) {
    const auto begin_at = [&](int32_t coordinate) {
      return message([&](CopyCase& test) {  //
        test.params.store_coordinates[store][0] = coordinate;
      });
    };
    EXPECT_THAT(begin_at(4), HasSubstr("begins at byte 8, not a multiple of 16"));
    EXPECT_THAT(begin_at(-4), HasSubstr("begins at byte -8, not a multiple of 16"));
    EXPECT_THAT(begin_at(-8), HasSubstr("begins at byte -16, before its tensor"));
    EXPECT_EQ(begin_at(0), "");
    EXPECT_EQ(begin_at(64), "");  // beyond the tensor: stores nothing
  }
  const auto into_rows_of_68 = [](CopyCase& test) {
    test.params.store_2d = StoreMap(test.stored_2d, 2, 68);
  };
  EXPECT_THAT(message(into_rows_of_68), HasSubstr("rows of 136 bytes"));
}

TEST(PrimitivesSm90Test, WarpFunctions) {
  StartCase({3, 0.1});
  const primitives::MathParams p = MakeMathCase();
  MOK_CHECK(Launch(primitives::MathKernel(), p, {}).ok());
  ASSERT_EQ(runtime::Synchronize(), OkStatus());
  const auto warp = HostCopy(p.warp, primitives::kThreads * 6);
  for (int t = 0; t < primitives::kThreads; ++t) {
    const int lane = t % 32, base = t - lane;
    auto square = [&](int l) { return static_cast<uint32_t>((base + l) * (base + l)); };
    EXPECT_EQ(warp[t * 6], square((lane + 3) % 32));
    EXPECT_EQ(warp[t * 6 + 1], square(lane ^ 5));
    EXPECT_EQ(warp[t * 6 + 2], square(lane < 3 ? lane : lane - 3));
    EXPECT_EQ(warp[t * 6 + 3], square(lane > 24 ? lane : lane + 7));
    uint32_t votes = 0;
    for (int l = 0; l < 32; ++l) votes |= ((base + l) % 3 == 0 ? 1u : 0u) << l;
    EXPECT_EQ(warp[t * 6 + 4], votes);
    EXPECT_EQ(warp[t * 6 + 5], static_cast<uint32_t>(std::popcount(square(lane))));
  }
}

TEST(PrimitivesSm90Test, MathRoundsAsDocumented) {
  StartCase({0, 0.1});
  const primitives::MathParams p = MakeMathCase();
  MOK_CHECK(Launch(primitives::MathKernel(), p, {}).ok());
  ASSERT_EQ(runtime::Synchronize(), OkStatus());
  const auto x = HostCopy(p.x, p.count), y = HostCopy(p.y, p.count), z = HostCopy(p.z, p.count);
  const auto fused = HostCopy(p.multiply_add, p.count);
  const auto packed = HostCopy(p.packed, p.count);
  const auto exponential = HostCopy(p.exponential, p.count);
  int differs = 0;
  for (int i = 16; i < p.count; ++i) {
    EXPECT_EQ(fused[i], std::fma(x[i], y[i], z[i]));
    differs += fused[i] != x[i] * y[i] + z[i];
    EXPECT_EQ(packed[i] & 0xFFFF, RoundToBFloat16(x[i]).bits);
    EXPECT_EQ(packed[i] >> 16, RoundToBFloat16(y[i]).bits);
    EXPECT_NEAR(exponential[i] / std::exp2(x[i]), 1.0f, 2e-7f);
  }
  EXPECT_GT(differs, p.count / 4);
}

}  // namespace
}  // namespace mok::testing
