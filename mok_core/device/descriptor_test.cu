// Our descriptors against CuTe's, and the operand layouts that they stand for.
#include "mok_core/device/descriptor.h"

#include <gtest/gtest.h>

#include <cute/arch/mma_sm100_desc.hpp>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

namespace mok {
namespace {

using cute::Int;

constexpr Swizzle kSwizzles[] = {Swizzle::kNone, Swizzle::k32, Swizzle::k64, Swizzle::k128};

cute::SM90::GMMA::LayoutType CuteLayoutSm90(Swizzle swizzle) {
  using Type = cute::SM90::GMMA::LayoutType;
  return swizzle == Swizzle::k128  ? Type::B128
         : swizzle == Swizzle::k64 ? Type::B64
         : swizzle == Swizzle::k32 ? Type::B32
                                   : Type::INTERLEAVE;
}

cute::UMMA::LayoutType CuteLayoutSm100(Swizzle swizzle) {
  using Type = cute::UMMA::LayoutType;
  return swizzle == Swizzle::k128  ? Type::SWIZZLE_128B
         : swizzle == Swizzle::k64 ? Type::SWIZZLE_64B
         : swizzle == Swizzle::k32 ? Type::SWIZZLE_32B
                                   : Type::SWIZZLE_NONE;
}

TEST(DescriptorTest, Sm90FieldsAgreeWithCute) {
  for (Swizzle swizzle : kSwizzles) {
    for (uint32_t address : {0u, 0x400u, 0x1F400u, 0x38C00u}) {
      const OperandLayout layout{swizzle, 16 * 3, 1024};
      cute::GmmaDescriptor want;
      want.desc_ = 0;
      want.bitfield.start_address_ = static_cast<uint16_t>(address >> 4);
      want.bitfield.leading_byte_offset_ = 3;
      want.bitfield.stride_byte_offset_ = 1024 >> 4;
      want.bitfield.base_offset_ = 0;
      want.bitfield.layout_type_ = static_cast<uint8_t>(CuteLayoutSm90(swizzle));
      EXPECT_EQ(OperandDescriptorSm90(layout) | DescriptorAddress(address), want.desc_);
    }
  }
}

TEST(DescriptorTest, Sm100FieldsAgreeWithCute) {
  for (Swizzle swizzle : kSwizzles) {
    const OperandLayout layout{swizzle, 256, 512};
    cute::UMMA::SmemDescriptor want;
    want.desc_ = 0;
    want.start_address_ = 0x1F400 >> 4;
    want.leading_byte_offset_ = 256 >> 4;
    want.stride_byte_offset_ = 512 >> 4;
    want.version_ = 1;
    want.lbo_mode_ = 0;
    want.base_offset_ = 0;
    want.layout_type_ = static_cast<uint8_t>(CuteLayoutSm100(swizzle));
    EXPECT_EQ(OperandDescriptorSm100(layout) | DescriptorAddress(0x1F400), want.desc_);
  }
}

TEST(DescriptorTest, InstructionDescriptorsAgreeWithCute) {
  for (uint32_t n : {16u, 64u, 256u}) {
    for (uint32_t majors = 0; majors < 4; ++majors) {
      const InstructionShape shape{128, n, static_cast<OperandMajor>(majors & 1),
                                   static_cast<OperandMajor>(majors >> 1)};
      cute::UMMA::InstrDescriptor want;
      want.desc_ = 0;
      want.c_format_ = 1;  // fp32
      want.a_format_ = 1;  // bf16
      want.b_format_ = 1;
      want.a_major_ = majors & 1;
      want.b_major_ = majors >> 1;
      want.n_dim_ = n >> 3;
      want.m_dim_ = 128 >> 4;
      EXPECT_EQ(InstructionDescriptorBf16(shape), want.desc_);
    }
  }
}

TEST(DescriptorTest, BlockScaledInstructionDescriptorAgreesWithCute) {
  for (uint32_t byte = 0; byte < 4; ++byte) {
    cute::UMMA::InstrDescriptorBlockScaled want;
    want.desc_ = 0;
    want.a_sf_id_ = byte;
    want.b_sf_id_ = 3 - byte;
    want.a_format_ = 0;  // e4m3
    want.b_format_ = 0;
    want.scale_format_ = 1;  // e8m0
    want.n_dim_ = 256 >> 3;
    want.m_dim_ = 128 >> 4;
    EXPECT_EQ(InstructionDescriptorMxf8({128, 256}, byte, 3 - byte), want.desc_);
  }
}

// Byte offset of element (row, k) of a K-major bf16 tile, as CuTe lays out `Atom` tiles.
template <class Atom>
void ExpectKMajorLayout(Swizzle swizzle) {
  constexpr int kRows = 64;
  const int span = static_cast<int>(swizzle), columns = span / 2;
  // Offsets inside the tile: the atoms themselves swizzle addresses.
  const auto layout = cute::as_position_independent_swizzle_layout(
      cute::tile_to_shape(Atom{}, cute::make_shape(Int<kRows>{}, Int<cute::size<1>(Atom{})>{})));
  const OperandLayout ours = KMajorLayout(swizzle);
  ASSERT_EQ(static_cast<int>(cute::size<1>(Atom{})), columns);
  for (int row = 0; row < kRows; ++row) {
    for (int k = 0; k < columns; ++k) {
      // Rows of one span; groups of 8 rows at stride_bytes; the chunk index is combined with the
      // number of the 128-byte line, as far as the span has chunks.
      const uint32_t linear = row / 8 * ours.stride_bytes + row % 8 * span + k * 2;
      const uint32_t chunks = span / 16 - 1;
      const uint32_t place = linear ^ ((linear >> 7 & chunks) << 4);
      EXPECT_EQ(static_cast<uint32_t>(layout(row, k)) * 2, place) << row << " " << k;
    }
  }
}

TEST(DescriptorTest, KMajorTilesLieAsCuteLaysThem) {
  using cute::bfloat16_t;
  ExpectKMajorLayout<cute::GMMA::Layout_K_SW128_Atom<bfloat16_t>>(Swizzle::k128);
  ExpectKMajorLayout<cute::GMMA::Layout_K_SW64_Atom<bfloat16_t>>(Swizzle::k64);
  ExpectKMajorLayout<cute::GMMA::Layout_K_SW32_Atom<bfloat16_t>>(Swizzle::k32);
}

// Byte offset of element (m, k) of an MN-major bf16 tile, as CuTe lays out `Atom` tiles; K first,
// as tensor loads of boxes that are one span wide leave them.
template <class Atom>
void ExpectMnMajorLayout(Swizzle swizzle) {
  constexpr int kSize = 128, kDepth = 64;
  const int span = static_cast<int>(swizzle), elements = span / 2;
  ASSERT_EQ(static_cast<int>(cute::size<0>(Atom{})), elements);
  const auto layout = cute::as_position_independent_swizzle_layout(cute::tile_to_shape(
      Atom{}, cute::make_shape(Int<kSize>{}, Int<kDepth>{}), cute::Step<cute::_2, cute::_1>{}));
  const OperandLayout ours = MnMajorLayout(swizzle, kDepth);
  for (int m = 0; m < kSize; ++m) {
    for (int k = 0; k < kDepth; ++k) {
      const uint32_t linear = m / elements * ours.leading_bytes + k / 8 * ours.stride_bytes +
                              k % 8 * span + m % elements * 2;
      const uint32_t chunks = span / 16 - 1;
      const uint32_t place = linear ^ ((linear >> 7 & chunks) << 4);
      ASSERT_EQ(static_cast<uint32_t>(layout(m, k)) * 2, place) << m << " " << k;
    }
  }
}

TEST(DescriptorTest, MnMajorTilesLieAsCuteLaysThem) {
  using cute::bfloat16_t;
  ExpectMnMajorLayout<cute::GMMA::Layout_MN_SW128_Atom<bfloat16_t>>(Swizzle::k128);
  ExpectMnMajorLayout<cute::GMMA::Layout_MN_SW64_Atom<bfloat16_t>>(Swizzle::k64);
  ExpectMnMajorLayout<cute::GMMA::Layout_MN_SW32_Atom<bfloat16_t>>(Swizzle::k32);
}

// The whole descriptor that CuTe derives from the layout of one instruction's part of a tile.
template <class Atom>
void ExpectMnMajorDescriptor(Swizzle swizzle) {
  constexpr uint32_t kAddress = 0x1F400;
  constexpr int kSize = 128, kDepth = 64;
  const auto layout = cute::tile_to_shape(Atom{}, cute::make_shape(Int<kSize>{}, Int<kDepth>{}),
                                          cute::Step<cute::_2, cute::_1>{});
  const auto tile = cute::make_tensor(
      cute::make_smem_ptr(reinterpret_cast<cute::bfloat16_t*>(uintptr_t{kAddress})), layout);
  const auto instruction =
      cute::local_tile(tile, cute::make_shape(Int<kSize>{}, Int<16>{}), cute::make_coord(0, 0));
  // On the host CuTe prints that it cannot convert the address, which is therefore set here.
  cute::GmmaDescriptor want =
      cute::SM90::GMMA::make_gmma_desc<cute::SM90::GMMA::Major::MN>(instruction);
  want.bitfield.start_address_ = kAddress >> 4;
  const uint64_t ours = OperandDescriptorSm90(MnMajorLayout(swizzle, kDepth));
  EXPECT_EQ(ours | DescriptorAddress(kAddress), want.desc_);
}

TEST(DescriptorTest, MnMajorDescriptorsAgreeWithCute) {
  using cute::bfloat16_t;
  ExpectMnMajorDescriptor<cute::GMMA::Layout_MN_SW128_Atom<bfloat16_t>>(Swizzle::k128);
  ExpectMnMajorDescriptor<cute::GMMA::Layout_MN_SW64_Atom<bfloat16_t>>(Swizzle::k64);
  ExpectMnMajorDescriptor<cute::GMMA::Layout_MN_SW32_Atom<bfloat16_t>>(Swizzle::k32);
}

TEST(DescriptorTest, AdvanceMovesTheAddressOnly) {
  const uint64_t descriptor = OperandDescriptorSm90(KMajorLayout(Swizzle::k128));
  EXPECT_EQ(AdvanceDescriptor(descriptor | DescriptorAddress(0x400), 32),
            descriptor | DescriptorAddress(0x420));
}

}  // namespace
}  // namespace mok
