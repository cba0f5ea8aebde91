#include "mok_comm/transfer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <random>
#include <tuple>
#include <vector>

#include "mok_comm/rank_barrier.h"
#include "mok_comm/symmetric_heap.h"
#include "mok_comm/test_processes.h"

namespace mok {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr std::byte kUntouched{0xEE};

// A routing table in plain vectors.
struct Table {
  std::vector<int32_t> source_rank;
  std::vector<int32_t> source_route;

  RowTable View() const {
    return {source_rank.data(), source_route.data(), static_cast<int64_t>(source_rank.size())};
  }
  void Add(int32_t rank, int32_t route) {
    source_rank.push_back(rank);
    source_route.push_back(route);
  }
};

struct Shape {
  std::vector<int64_t> num_tokens;  // by rank
  int topk = 1;
  int64_t row_bytes = 0;

  int size() const { return static_cast<int>(num_tokens.size()); }
  int64_t max_tokens() const { return *std::max_element(num_tokens.begin(), num_tokens.end()); }
};

// Sends each route to a random reader in random order, with padding in between; all ranks compute
// the same tables from the seed. With `sorted`, routes keep their order, so that runs appear.
std::vector<Table> RandomTables(const Shape& shape, uint32_t seed, bool sorted) {
  std::mt19937 random(seed);
  std::vector<std::pair<int32_t, int32_t>> routes;
  for (int rank = 0; rank < shape.size(); ++rank) {
    const int64_t num_routes = shape.num_tokens[static_cast<size_t>(rank)] * shape.topk;
    for (int64_t route = 0; route < num_routes; ++route) {
      routes.emplace_back(rank, static_cast<int32_t>(route));
    }
  }
  if (!sorted) std::shuffle(routes.begin(), routes.end(), random);
  std::vector<Table> tables(static_cast<size_t>(shape.size()));
  size_t reader = 0;
  for (const auto& [rank, route] : routes) {
    // Sorted routes stay with one reader for a while.
    if (!sorted || random() % 8 == 0) reader = random() % tables.size();
    if (random() % 10 == 0) tables[reader].Add(-1, -1);
    if (random() % 20 != 0) tables[reader].Add(rank, route);
  }
  return tables;
}

// The bytes of row `row` (a token or a route) of rank `rank` in the buffer called `salt`.
std::vector<std::byte> RowBytes(int salt, int rank, int64_t row, int64_t row_bytes) {
  std::vector<std::byte> bytes(static_cast<size_t>(row_bytes));
  auto value = static_cast<uint32_t>(salt * 7919 + rank * 104729 + row * 31);
  for (std::byte& byte : bytes) {
    value = value * 1664525 + 1013904223;
    byte = static_cast<std::byte>(value >> 24);
  }
  return bytes;
}

// Rows with gaps, all bytes `kUntouched` at first.
struct Buffer {
  Buffer(int64_t rows, int64_t row_bytes, int64_t gap)
      : data(static_cast<size_t>(rows * (row_bytes + gap)), kUntouched),
        rows{data.data(), row_bytes, row_bytes + gap} {}
  std::byte* Row(int64_t row) { return rows.data + row * rows.stride_bytes; }

  std::vector<std::byte> data;
  LocalRows rows;
};

// Everything a test of one exchange needs: tables, a token buffer and a route buffer on each rank.
class TransferTest : public ::testing::TestWithParam<std::tuple<int, int, int64_t, bool>> {
 protected:
  void SetUp() override {
    const auto [size, topk, row_bytes, sorted] = GetParam();
    shape_.topk = topk;
    shape_.row_bytes = row_bytes;
    for (int rank = 0; rank < size; ++rank) shape_.num_tokens.push_back((rank * 13 + 29) % 31);
    tables_ = RandomTables(shape_, static_cast<uint32_t>(size * 100 + topk), sorted);
    const int64_t max_routes = shape_.max_tokens() * topk;
    HeapLayout layout;
    tokens_offset_ = layout.Reserve(static_cast<size_t>(shape_.max_tokens() * row_bytes));
    routes_offset_ = layout.Reserve(static_cast<size_t>(max_routes * row_bytes));
    scalars_offset_ = layout.Reserve(static_cast<size_t>(max_routes) * sizeof(float));
    heaps_ = std::move(CreateInProcessHeaps(size, layout.bytes() + 1)).value();
    for (const auto& heap : heaps_) std::memset(heap->local(), 0xEE, heap->bytes());
  }

  int64_t NumRows(int reader) const { return tables_[static_cast<size_t>(reader)].View().rows; }
  RowTable TableOf(int reader) const { return tables_[static_cast<size_t>(reader)].View(); }
  std::byte* const* Bases() const { return heaps_[0]->bases(); }
  PeerBuffers Tokens() const { return {Bases(), tokens_offset_, shape_.row_bytes}; }
  PeerBuffers Routes() const { return {Bases(), routes_offset_, shape_.row_bytes}; }
  PeerBuffers Scalars() const { return {Bases(), scalars_offset_, sizeof(float)}; }
  LocalRows TokensOf(int rank) const {
    return {Bases()[rank] + tokens_offset_, shape_.row_bytes, shape_.row_bytes};
  }
  LocalRows RoutesOf(int rank) const {
    return {Bases()[rank] + routes_offset_, shape_.row_bytes, shape_.row_bytes};
  }
  float* ScalarsOf(int rank) const {
    return reinterpret_cast<float*>(Bases()[rank] + scalars_offset_);
  }

  void FillTokens() {
    for (int rank = 0; rank < shape_.size(); ++rank) {
      for (int64_t token = 0; token < shape_.num_tokens[static_cast<size_t>(rank)]; ++token) {
        const auto bytes = RowBytes(1, rank, token, shape_.row_bytes);
        std::copy(bytes.begin(), bytes.end(), TokensOf(rank).data + token * shape_.row_bytes);
      }
    }
  }

  // Row i of the reader holds the token of its route; padding and gaps are untouched.
  void ExpectDispatched(int reader, Buffer& buffer) {
    const RowTable table = TableOf(reader);
    for (int64_t row = 0; row < table.rows; ++row) {
      std::vector<std::byte> expected(static_cast<size_t>(shape_.row_bytes), kUntouched);
      if (table.source_rank[row] >= 0) {
        expected = RowBytes(1, table.source_rank[row], table.source_route[row] / shape_.topk,
                            shape_.row_bytes);
      }
      ASSERT_TRUE(std::equal(expected.begin(), expected.end(), buffer.Row(row))) << row;
      for (int64_t gap = shape_.row_bytes; gap < buffer.rows.stride_bytes; ++gap) {
        ASSERT_EQ(buffer.Row(row)[gap], kUntouched);
      }
    }
  }

  // Rows of the reader for combine: row i has bytes of its own.
  Buffer ReaderRows(int reader, int64_t gap) {
    Buffer buffer(NumRows(reader), shape_.row_bytes, gap);
    for (int64_t row = 0; row < NumRows(reader); ++row) {
      const auto bytes = RowBytes(2, reader, row, shape_.row_bytes);
      std::copy(bytes.begin(), bytes.end(), buffer.Row(row));
    }
    return buffer;
  }

  // Each route's row on its source rank holds the reader's row; routes in no table are untouched.
  void ExpectCombined() {
    for (int rank = 0; rank < shape_.size(); ++rank) {
      const int64_t num_routes = shape_.max_tokens() * shape_.topk;
      std::vector<std::byte> expected(static_cast<size_t>(num_routes * shape_.row_bytes),
                                      kUntouched);
      for (int reader = 0; reader < shape_.size(); ++reader) {
        const RowTable table = TableOf(reader);
        for (int64_t row = 0; row < table.rows; ++row) {
          if (table.source_rank[row] != rank) continue;
          const auto bytes = RowBytes(2, reader, row, shape_.row_bytes);
          std::copy(bytes.begin(), bytes.end(),
                    expected.begin() + table.source_route[row] * shape_.row_bytes);
        }
      }
      ASSERT_TRUE(std::equal(expected.begin(), expected.end(), RoutesOf(rank).data)) << rank;
    }
  }

  Shape shape_;
  std::vector<Table> tables_;
  std::vector<std::unique_ptr<SymmetricHeap>> heaps_;
  size_t tokens_offset_ = 0;
  size_t routes_offset_ = 0;
  size_t scalars_offset_ = 0;
};

TEST_P(TransferTest, DispatchByPull) {
  FillTokens();
  for (const int64_t gap : {0, 5}) {
    for (int reader = 0; reader < shape_.size(); ++reader) {
      Buffer buffer(NumRows(reader), shape_.row_bytes, gap);
      PullRows(TableOf(reader), shape_.topk, Tokens(), buffer.rows);
      ExpectDispatched(reader, buffer);
    }
  }
}

TEST_P(TransferTest, DispatchByPush) {
  FillTokens();
  for (const int64_t gap : {0, 5}) {
    for (int reader = 0; reader < shape_.size(); ++reader) {
      Buffer buffer(NumRows(reader), shape_.row_bytes, gap);
      for (int rank = 0; rank < shape_.size(); ++rank) {
        PushRowsToReader(TableOf(reader), rank, shape_.topk, TokensOf(rank), buffer.rows);
      }
      ExpectDispatched(reader, buffer);
    }
  }
}

TEST_P(TransferTest, CombineByPush) {
  for (const int64_t gap : {0, 3}) {
    for (int reader = 0; reader < shape_.size(); ++reader) {
      PushRows(TableOf(reader), ReaderRows(reader, gap).rows, Routes());
    }
    ExpectCombined();
  }
}

TEST_P(TransferTest, CombineByPull) {
  for (const int64_t gap : {0, 3}) {
    for (int reader = 0; reader < shape_.size(); ++reader) {
      const Buffer buffer = ReaderRows(reader, gap);
      for (int rank = 0; rank < shape_.size(); ++rank) {
        PullRowsFromReader(TableOf(reader), rank, buffer.rows, RoutesOf(rank));
      }
    }
    ExpectCombined();
  }
}

// A task moves a part of the table: a few rows starting anywhere.
TEST_P(TransferTest, PartsOfATableAddUp) {
  FillTokens();
  for (int reader = 0; reader < shape_.size(); ++reader) {
    Buffer buffer(NumRows(reader), shape_.row_bytes, 0);
    for (int64_t first = 0; first < NumRows(reader); first += 7) {
      const int64_t rows = std::min<int64_t>(7, NumRows(reader) - first);
      LocalRows part = buffer.rows;
      part.data = buffer.Row(first);
      PullRows(TableOf(reader).Block(first, rows), shape_.topk, Tokens(), part);
    }
    ExpectDispatched(reader, buffer);
  }
}

TEST_P(TransferTest, ScalarsBothWays) {
  for (int rank = 0; rank < shape_.size(); ++rank) {
    const int64_t num_routes = shape_.num_tokens[static_cast<size_t>(rank)] * shape_.topk;
    for (int64_t route = 0; route < num_routes; ++route) {
      ScalarsOf(rank)[route] = static_cast<float>(1000 * rank + route);
    }
  }
  std::vector<std::vector<float>> pulled;
  for (int reader = 0; reader < shape_.size(); ++reader) {
    const RowTable table = TableOf(reader);
    std::vector<float> values(static_cast<size_t>(table.rows), -1.0f);
    std::vector<float> pushed = values;
    PullScalars(table, Scalars(), values.data());
    for (int rank = 0; rank < shape_.size(); ++rank) {
      PushScalarsToReader(table, rank, ScalarsOf(rank), pushed.data());
    }
    EXPECT_EQ(values, pushed);
    for (int64_t row = 0; row < table.rows; ++row) {
      const int32_t rank = table.source_rank[row];
      const auto expected =
          rank < 0 ? -1.0f : static_cast<float>(1000 * rank + table.source_route[row]);
      ASSERT_EQ(values[static_cast<size_t>(row)], expected);
    }
    pulled.push_back(values);
  }
  // Back again, by either direction, into cleared memory: routes in a table return.
  for (const bool push : {true, false}) {
    for (int rank = 0; rank < shape_.size(); ++rank) {
      std::fill_n(ScalarsOf(rank), shape_.max_tokens() * shape_.topk, -2.0f);
    }
    for (int reader = 0; reader < shape_.size(); ++reader) {
      const float* values = pulled[static_cast<size_t>(reader)].data();
      if (push) PushScalars(TableOf(reader), values, Scalars());
      for (int rank = 0; !push && rank < shape_.size(); ++rank) {
        PullScalarsFromReader(TableOf(reader), rank, values, ScalarsOf(rank));
      }
    }
    for (int reader = 0; reader < shape_.size(); ++reader) {
      const RowTable table = TableOf(reader);
      for (int64_t row = 0; row < table.rows; ++row) {
        const int32_t rank = table.source_rank[row];
        if (rank < 0) continue;
        const int32_t route = table.source_route[row];
        ASSERT_EQ(ScalarsOf(rank)[route], static_cast<float>(1000 * rank + route));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, TransferTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 8),
                                            ::testing::Values(1, 2, 6),
                                            ::testing::Values<int64_t>(1, 16, 513),
                                            ::testing::Bool()));

TEST(TransferEdgeTest, EmptyAndPaddingTablesTouchNothing) {
  std::byte byte = kUntouched;
  std::byte* base = &byte;
  const PeerBuffers peers{&base, 0, 1};
  const LocalRows local{&byte, 1, 1};
  PullRows({}, 1, peers, local);
  PushRows({}, local, peers);
  const std::vector<int32_t> padding(128, -1);
  const RowTable table{padding.data(), padding.data(), 128};
  PullRows(table, 1, peers, local);
  PushRows(table, local, peers);
  PushRowsToReader(table, 0, 1, local, local);
  PullRowsFromReader(table, 0, local, local);
  float scalar = 3;
  PullScalars(table, peers, &scalar);
  PushScalars(table, &scalar, peers);
  EXPECT_EQ(byte, kUntouched);
  EXPECT_EQ(scalar, 3);
}

// Ranks as processes, all at once: dispatch to the readers, then combine back, in either direction,
// between barriers; each token comes back K times.
void RoundTrip(const SymmetricHeap& heap, const Shape& shape, bool reader_drives) {
  const std::vector<Table> tables = RandomTables(shape, 77, /*sorted=*/false);
  const auto own = static_cast<size_t>(heap.rank());
  const int64_t max_routes = shape.max_tokens() * shape.topk;
  const int64_t all_routes =
      std::accumulate(shape.num_tokens.begin(), shape.num_tokens.end(), int64_t{0}) * shape.topk;
  HeapLayout layout;
  const size_t barrier_offset = layout.Reserve(RankBarrier::RegionBytes(shape.size()));
  const size_t tokens = layout.Reserve(static_cast<size_t>(shape.max_tokens() * shape.row_bytes));
  const size_t routes = layout.Reserve(static_cast<size_t>(max_routes * shape.row_bytes));
  const size_t rows = layout.Reserve(static_cast<size_t>(2 * all_routes * shape.row_bytes));
  ASSERT_LE(layout.bytes(), heap.bytes());
  const auto local = [&](int rank, size_t offset) {
    return LocalRows{heap.base(rank) + offset, shape.row_bytes, shape.row_bytes};
  };
  const auto peers = [&](size_t offset) {
    return PeerBuffers{heap.bases(), offset, shape.row_bytes};
  };
  RankBarrier barrier(heap, barrier_offset);
  const auto synchronize = [&] {
    WaitContext context;
    context.rank = heap.rank();
    context.task = "RoundTrip";
    context.deadline = steady_clock::now() + seconds(60);
    const Status status = barrier.ArriveAndWait(context);
    ASSERT_TRUE(status.ok()) << status;
  };
  for (int64_t token = 0; token < shape.num_tokens[own]; ++token) {
    const auto bytes = RowBytes(1, heap.rank(), token, shape.row_bytes);
    std::copy(bytes.begin(), bytes.end(),
              heap.local() + tokens + static_cast<size_t>(token * shape.row_bytes));
  }
  ASSERT_NO_FATAL_FAILURE(synchronize());
  if (reader_drives) {
    PullRows(tables[own].View(), shape.topk, peers(tokens), local(heap.rank(), rows));
    PushRows(tables[own].View(), local(heap.rank(), rows), peers(routes));
  } else {
    for (int reader = 0; reader < shape.size(); ++reader) {
      PushRowsToReader(tables[static_cast<size_t>(reader)].View(), heap.rank(), shape.topk,
                       local(heap.rank(), tokens), local(reader, rows));
    }
    ASSERT_NO_FATAL_FAILURE(synchronize());
    for (int reader = 0; reader < shape.size(); ++reader) {
      PullRowsFromReader(tables[static_cast<size_t>(reader)].View(), heap.rank(),
                         local(reader, rows), local(heap.rank(), routes));
    }
  }
  ASSERT_NO_FATAL_FAILURE(synchronize());
  for (const Table& table : tables) {
    for (size_t row = 0; row < table.source_rank.size(); ++row) {
      if (table.source_rank[row] != heap.rank()) continue;
      const int32_t route = table.source_route[row];
      const auto bytes = RowBytes(1, heap.rank(), route / shape.topk, shape.row_bytes);
      const std::byte* returned =
          heap.local() + routes + static_cast<size_t>(route * shape.row_bytes);
      ASSERT_TRUE(std::equal(bytes.begin(), bytes.end(), returned)) << route;
    }
  }
}

TEST(TransferRanksTest, RoundTripOfProcesses) {
  const Shape shape{{50, 0, 17, 33}, 3, 1000};
  for (const bool reader_drives : {true, false}) {
    EXPECT_TRUE(RunProcessesOnHeap("round_trip", 4, 4 << 20, [&](const SymmetricHeap& heap) {
      RoundTrip(heap, shape, reader_drives);
    }));
  }
}

TEST(TransferRanksTest, RoundTripOfThreads) {
  const Shape shape{{20, 31, 0}, 2, 100};
  for (const bool reader_drives : {true, false}) {
    RunThreadsOnHeap(3, 1 << 20,
                     [&](const SymmetricHeap& heap) { RoundTrip(heap, shape, reader_drives); });
  }
}

}  // namespace
}  // namespace mok
