#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "mok_comm/symmetric_heap.h"

namespace mok {
namespace {

using ::testing::HasSubstr;

TEST(InProcessHeapTest, EveryRankSeesEveryRank) {
  constexpr int kSize = 3;
  constexpr size_t kBytes = 5000;  // not a multiple of a page
  auto heaps = CreateInProcessHeaps(kSize, kBytes);
  ASSERT_TRUE(heaps.ok()) << heaps.status();
  ASSERT_EQ(heaps->size(), static_cast<size_t>(kSize));
  for (int rank = 0; rank < kSize; ++rank) {
    const SymmetricHeap& heap = *(*heaps)[static_cast<size_t>(rank)];
    EXPECT_EQ(heap.rank(), rank);
    EXPECT_EQ(heap.size(), kSize);
    EXPECT_EQ(heap.bytes(), kBytes);
    EXPECT_EQ(heap.local(), heap.base(rank));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(heap.local()) % 4096, 0u);
    for (size_t i = 0; i < kBytes; ++i) ASSERT_EQ(heap.local()[i], std::byte{0});
    std::memset(heap.local(), rank + 1, kBytes);
  }
  for (const auto& heap : *heaps) {
    for (int peer = 0; peer < kSize; ++peer) {
      EXPECT_EQ(heap->bases()[peer], heap->base(peer));
      EXPECT_EQ(heap->base(peer)[0], static_cast<std::byte>(peer + 1));
      EXPECT_EQ(heap->base(peer)[kBytes - 1], static_cast<std::byte>(peer + 1));
    }
  }
}

TEST(InProcessHeapTest, MemoryLivesAsLongAsAnyHeap) {
  auto heaps = std::move(CreateInProcessHeaps(4, 64)).value();
  const std::unique_ptr<SymmetricHeap> last = std::move(heaps[2]);
  heaps.clear();
  for (int peer = 0; peer < 4; ++peer) last->base(peer)[63] = std::byte{9};
  EXPECT_EQ(last->base(3)[63], std::byte{9});
}

TEST(InProcessHeapTest, RejectsBadSizes) {
  EXPECT_EQ(CreateInProcessHeaps(0, 64).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(CreateInProcessHeaps(-1, 64).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(CreateInProcessHeaps(1, 0).status().code(), StatusCode::kInvalidArgument);
}

TEST(InProcessHeapTest, ReportsExhaustion) {
  for (const size_t bytes : {size_t{1} << 46, SIZE_MAX}) {
    const Status status = CreateInProcessHeaps(8, bytes).status();
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
    EXPECT_THAT(status.message(), HasSubstr(StrCat("8 x ", bytes, " bytes")));
  }
}

TEST(HeapLayoutTest, PlacesAlignedRegionsOneBehindTheOther) {
  HeapLayout layout;
  EXPECT_EQ(layout.bytes(), 0u);
  EXPECT_EQ(layout.Reserve(10), 0u);
  EXPECT_EQ(layout.Reserve(1), 128u);
  EXPECT_EQ(layout.Reserve(0, 64), 192u);
  EXPECT_EQ(layout.Reserve(100, 4096), 4096u);
  EXPECT_EQ(layout.bytes(), 4196u);
}

}  // namespace
}  // namespace mok
