// Pull, push and meetings of one to three emulated GPUs: every byte, every planted mistake, a
// rank that never comes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "mok_comm/sm90/testing/exchange_test_kernel.h"
#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_core/emulator/tests/test_support.h"

namespace mok::testing {
namespace {

struct ExchangeSpec {
  std::vector<int> tokens = {5, 7};  // of each rank
  int topk = 2;
  int row_bytes = 96;
  uint32_t chunk_bytes = 64;
  int rows_per_tile = 3;
  int ring_tiles = 2;
  unsigned blocks = 2;
  uint64_t interval_ns = 0, interval_beside_pulls_ns = 0;
  bool copies = false;  // rows of tokens that are in the ring, which holds all
  bool skips = false;   // pushes of a rank's own rows, which keep what was there

  int num_ranks() const { return static_cast<int>(tokens.size()); }
};

// What one rank has.
struct RankState {
  ExchangeTestParams params{};
  DeviceWaitRecord* record = nullptr;
  void* stream = nullptr;
  std::vector<uint32_t> x;  // [tokens, row words]
  std::vector<bool> keeps;  // [routes]: what returns is not moved
};
constexpr uint32_t kKept = 0x4B455054;

class ExchangeRun {
 public:
  explicit ExchangeRun(const ExchangeSpec& spec) : spec_(spec), ranks_(spec.tokens.size()) {
    // Every route goes to a random rank; a rank's table lists its routes in random order.
    std::mt19937 random(7);
    std::vector<std::vector<int32_t>> sources(ranks_.size()), routes(ranks_.size());
    for (int rank = 0; rank < spec.num_ranks(); ++rank) {
      for (int route = 0; route < spec.tokens[rank] * spec.topk; ++route) {
        const size_t owner = random() % ranks_.size();
        ranks_[rank].keeps.push_back(spec.skips && static_cast<int>(owner) == rank);
        const size_t at = sources[owner].empty() ? 0 : random() % sources[owner].size();
        sources[owner].insert(sources[owner].begin() + static_cast<std::ptrdiff_t>(at), rank);
        routes[owner].insert(routes[owner].begin() + static_cast<std::ptrdiff_t>(at), route);
      }
    }
    for (int rank = 0; rank < spec.num_ranks(); ++rank) {
      Allocate(rank, sources[rank], routes[rank]);
    }
    for (int rank = 0; rank < spec.num_ranks(); ++rank) Connect(rank);
  }

  void Launch(int rank, int bug) const {
    runtime::LaunchConfig config;
    config.grid = {spec_.blocks, 1, 1};
    config.block = {kExchangeTestThreads, 1, 1};
    config.shared_bytes = ExchangeTestSharedBytes();
    config.device = rank;
    config.stream = ranks_[rank].stream;
    const ExchangeTestParams& params = ranks_[rank].params;
    MOK_CHECK(
        runtime::LaunchKernelAddress(ExchangeTestKernel(bug), config, &params, sizeof params).ok());
  }

  void LaunchAll(int bug) const {
    for (int rank = 0; rank < spec_.num_ranks(); ++rank) Launch(rank, bug);
  }

  // Every route has got its token's row back, but for those that keep what was there.
  bool Matches() const {
    for (int rank = 0; rank < spec_.num_ranks(); ++rank) {
      const int words = spec_.row_bytes / 4, rows = spec_.tokens[rank] * spec_.topk;
      const auto copy = HostCopy(ranks_[rank].params.copy, static_cast<size_t>(rows) * words);
      const std::vector<uint32_t> kept(static_cast<size_t>(words), kKept);
      for (int row = 0; row < rows; ++row) {
        const uint32_t* moved = ranks_[rank].x.data() + row / spec_.topk * words;
        const uint32_t* expected = ranks_[rank].keeps[row] ? kept.data() : moved;
        if (std::memcmp(copy.data() + row * words, expected, spec_.row_bytes) != 0) return false;
      }
      const auto scalars = HostCopy(ranks_[rank].params.copied_scalars, static_cast<size_t>(rows));
      for (int row = 0; row < rows; ++row) {
        if (scalars[row] != ScalarOfRoute(row)) return false;
      }
    }
    return true;
  }

  // The state that a second pass starts from.
  void StartPass(uint64_t epoch) {
    for (RankState& rank : ranks_) {
      const size_t bytes = ExchangeTestCounters(spec_.ring_tiles) * sizeof(uint64_t);
      MOK_CHECK(runtime::Fill(rank.params.counters, 0, bytes).ok());
      rank.params.epoch = epoch;
    }
  }

  const DeviceWaitRecord& record(int rank) const { return *ranks_[rank].record; }

 private:
  void Allocate(int rank, const std::vector<int32_t>& sources, const std::vector<int32_t>& routes) {
    RankState& state = ranks_[rank];
    ExchangeTestParams& p = state.params;
    const size_t words = static_cast<size_t>(spec_.row_bytes) / 4;
    const auto num_rows = static_cast<int32_t>(sources.size());
    for (size_t i = 0; i < spec_.tokens[rank] * words; ++i) {
      state.x.push_back(static_cast<uint32_t>(rank * 100000 + i));
    }
    p.tiles = {(num_rows + spec_.rows_per_tile - 1) / spec_.rows_per_tile, spec_.rows_per_tile,
               num_rows, spec_.ring_tiles};
    auto with_one = [](auto values) {  // allocations are never empty
      values.push_back(0);
      return values;
    };
    auto padded = [&](std::vector<int32_t> rows) {  // to whole tiles, at least one
      rows.resize(static_cast<size_t>(std::max(p.tiles.num_tiles, 1)) * spec_.rows_per_tile, -1);
      return rows;
    };
    p.pull.sources = {DeviceArray(padded(sources), "source_rank", rank),
                      DeviceArray(padded(routes), "source_route", rank)};
    p.pull.routes_per_row = spec_.topk;
    p.pull.own_rank = rank;
    p.pull.interval_ns = 0;
    p.pull.peers.row_bytes = spec_.row_bytes;
    const size_t ring_words = words * spec_.ring_tiles * spec_.rows_per_tile;
    p.pull.local =
        reinterpret_cast<std::byte*>(UninitializedArray<uint32_t>(ring_words, "ring", rank));
    if (spec_.copies) p.pull.earlier = EarlierRowsOf(rank, sources, routes);
    p.push = p.pull;
    p.push.routes_per_row = 1;
    p.push.interval_ns = spec_.interval_ns;
    p.push.interval_beside_pulls_ns = spec_.interval_beside_pulls_ns;
    p.source = DeviceArray(with_one(state.x), "source", rank);
    p.x_words = static_cast<int32_t>(state.x.size());
    p.x = UninitializedArray<uint32_t>(p.x_words + 1, "x", rank);
    p.pull.peers.of_rank[rank] = reinterpret_cast<std::byte*>(p.x);
    p.words = static_cast<int32_t>(state.x.size()) * spec_.topk;
    p.push.skips_own_rank = spec_.skips;
    const std::vector<uint32_t> kept(static_cast<size_t>(p.words) + 1, kKept);
    uint32_t* returned = spec_.skips ? DeviceArray(kept, "returned", rank)
                                     : UninitializedArray<uint32_t>(p.words + 1, "returned", rank);
    p.returned = returned;
    p.push.peers.of_rank[rank] = reinterpret_cast<std::byte*>(returned);
    p.copy = UninitializedArray<uint32_t>(p.words + 1, "copy", rank);
    p.chunk_bytes = spec_.chunk_bytes;
    p.num_routes = spec_.tokens[rank] * spec_.topk;
    const size_t scalars = static_cast<size_t>(p.num_routes) + 1;
    p.scalars = UninitializedArray<float>(scalars, "scalars", rank);
    p.returned_scalars = UninitializedArray<float>(scalars, "returned_scalars", rank);
    p.copied_scalars = UninitializedArray<float>(scalars, "copied_scalars", rank);
    const size_t ring_rows = static_cast<size_t>(spec_.ring_tiles) * spec_.rows_per_tile;
    p.pull_scalars.local = UninitializedArray<float>(ring_rows, "ring scalars", rank);
    p.pull_scalars.peers.of_rank[rank] = p.scalars;
    p.push_scalars.parts = p.pull_scalars.local;
    p.push_scalars.num_parts = 1;
    p.push_scalars.peers.of_rank[rank] = p.returned_scalars;
    const std::vector<uint64_t> zeros(ExchangeTestCounters(spec_.ring_tiles), 0);
    p.counters = DeviceArray(zeros, "counters", rank);
    p.epoch = 1;
    const std::vector<uint64_t> flags(kNumMeetings * ranks_.size(), 0);
    p.meeting.flags_of_rank[rank] = DeviceArray(flags, "flags", rank);
    p.meeting.rank = rank;
    p.meeting.num_ranks = spec_.num_ranks();
    state.record = static_cast<DeviceWaitRecord*>(
        runtime::AllocateMappedHost(sizeof(DeviceWaitRecord), "wait_record").value());
    uint32_t* abort = DeviceArray(std::vector<uint32_t>{0}, "abort", rank);
    p.wait = {state.record, abort, 2'000'000'000, rank};
    p.meeting_wait = {state.record, abort, 1'000'000'000, rank};
    state.stream = runtime::CreateStream(rank).value();
  }

  // Of a ring whose tiles are blocks.
  EarlierRows EarlierRowsOf(int rank, const std::vector<int32_t>& sources,
                            const std::vector<int32_t>& routes) const {
    const int64_t most = *std::max_element(spec_.tokens.begin(), spec_.tokens.end());
    std::vector<int32_t> first(ranks_.size() * static_cast<size_t>(most), -1);
    for (size_t row = sources.size(); row-- > 0;) {
      first[sources[row] * most + routes[row] / spec_.topk] = static_cast<int32_t>(row);
    }
    return {DeviceArray(first, "first_row", rank), most, CeilLog2(spec_.rows_per_tile), 1};
  }

  void Connect(int rank) {
    for (int peer = 0; peer < spec_.num_ranks(); ++peer) {
      if (peer == rank) continue;
      MOK_CHECK(runtime::EnablePeerAccess(rank, peer).ok());
      const ExchangeTestParams& other = ranks_[peer].params;
      ExchangeTestParams& p = ranks_[rank].params;
      p.pull.peers.of_rank[peer] = other.pull.peers.of_rank[peer];
      p.push.peers.of_rank[peer] = other.push.peers.of_rank[peer];
      p.pull_scalars.peers.of_rank[peer] = other.scalars;
      p.push_scalars.peers.of_rank[peer] = other.returned_scalars;
      p.meeting.flags_of_rank[peer] = other.meeting.flags_of_rank[peer];
    }
  }

  ExchangeSpec spec_;
  std::vector<RankState> ranks_;
};

void ExpectExchanged(const ExchangeSpec& spec, const std::string& label) {
  for (const Interleaving& interleaving : kInterleavings) {
    StartCase(interleaving);
    const ExchangeRun run(spec);
    run.LaunchAll(0);
    const Outcome outcome = RunAndCompare([&] { return run.Matches(); });
    EXPECT_EQ(outcome.kind, "ok") << label << ", seed " << interleaving.seed << outcome.text;
  }
}

TEST(ExchangeTest, RowsOfAnySize) {
  for (const int row_bytes : {16, 48, 64, 80, 1008}) {
    for (const uint32_t chunk_bytes : {16u, 64u, 512u}) {
      if (row_bytes / chunk_bytes > 8) continue;
      ExchangeSpec spec;
      spec.row_bytes = row_bytes;
      spec.chunk_bytes = chunk_bytes;
      ExpectExchanged(spec, StrCat("row ", row_bytes, " chunk ", chunk_bytes));
    }
  }
}

TEST(ExchangeTest, RanksTokensAndTiles) {
  ExchangeSpec three;
  three.tokens = {0, 5, 17};
  three.topk = 3;
  ExpectExchanged(three, "three ranks, one without tokens");
  three.blocks = 1;
  three.rows_per_tile = 40;  // more rows than lanes
  ExpectExchanged(three, "long tiles");
  ExchangeSpec one;
  one.tokens = {9};
  ExpectExchanged(one, "one rank");
  ExchangeSpec none;
  none.tokens = {0, 0};
  ExpectExchanged(none, "no tokens");
  ExchangeSpec paced;
  paced.interval_ns = 500;
  ExpectExchanged(paced, "paced");
  paced.interval_beside_pulls_ns = 2000;
  ExpectExchanged(paced, "paced, and more so beside pulls");
}

TEST(ExchangeTest, PassesFollowEachOther) {
  for (const Interleaving& interleaving : kInterleavings) {
    StartCase(interleaving);
    ExchangeRun run(ExchangeSpec{});
    for (uint64_t epoch = 1; epoch <= 3; ++epoch) {
      run.StartPass(epoch);
      run.LaunchAll(0);
      const Outcome outcome = RunAndCompare([&] { return run.Matches(); });
      EXPECT_EQ(outcome.kind, "ok") << "pass " << epoch << outcome.text;
    }
  }
}

Outcome RunBug(int bug, const Interleaving& interleaving) {
  StartCase(interleaving);
  ExchangeSpec spec;
  spec.tokens = {9, 14};
  const ExchangeRun run(spec);
  run.LaunchAll(bug);
  return RunAndCompare([&] { return run.Matches(); });
}

TEST(ExchangeTest, EveryPlantedBugIsFlagged) {
  ExpectEveryBugFlagged(RunBug, static_cast<int>(ExchangeBug::kCount), [](int bug) {
    return bug == static_cast<int>(ExchangeBug::kCopiesTooEarly) ||
           bug == static_cast<int>(ExchangeBug::kNoFenceBeforeCopy) ||
           bug == static_cast<int>(ExchangeBug::kMovesOwnRows);
  });
}

// Rings that hold every row, and tokens with several rows on a rank.
ExchangeSpec Copying() {
  ExchangeSpec spec;
  spec.tokens = {9, 14};
  spec.topk = 4;
  spec.rows_per_tile = 4;
  spec.ring_tiles = 23;  // all routes to one rank
  spec.copies = true;
  return spec;
}

TEST(ExchangeTest, RowsThatAreThereAreCopied) {
  ExpectExchanged(Copying(), "two ranks");
  ExchangeSpec three = Copying();
  three.tokens = {0, 5, 11};
  three.blocks = 3;
  ExpectExchanged(three, "three ranks");
}

// Without a mistake the exchange is right, with each of these it is noticed.
void ExpectFlagged(const ExchangeSpec& spec, std::initializer_list<ExchangeBug> bugs) {
  std::vector<ExchangeBug> all(bugs);
  all.push_back(ExchangeBug::kNone);
  for (const ExchangeBug bug : all) {
    for (const Interleaving& interleaving : kInterleavings) {
      StartCase(interleaving);
      const ExchangeRun run(spec);
      run.LaunchAll(static_cast<int>(bug));
      const Outcome outcome = RunAndCompare([&] { return run.Matches(); });
      EXPECT_EQ(outcome.kind == "ok", bug == ExchangeBug::kNone)
          << static_cast<int>(bug) << ", seed " << interleaving.seed << ": " << outcome.kind
          << outcome.text;
    }
  }
}

TEST(ExchangeTest, EveryPlantedBugOfCopiesIsFlagged) {
  ExpectFlagged(Copying(), {ExchangeBug::kCopiesTooEarly, ExchangeBug::kNoFenceBeforeCopy});
}

TEST(ExchangeTest, OwnRowsMayBeSkipped) {
  ExchangeSpec spec;
  spec.tokens = {9, 14};
  spec.skips = true;
  ExpectFlagged(spec, {ExchangeBug::kMovesOwnRows});
  spec.row_bytes = 192;     // three chunks, for two lanes
  spec.rows_per_tile = 40;  // more rows than lanes
  spec.tokens = {31, 0, 40};
  spec.interval_ns = 500;
  ExpectExchanged(spec, "several chunks, three ranks, paced");
  spec.tokens = {9};
  ExpectExchanged(spec, "no row moves");
}

TEST(ExchangeTest, MissingRankIsNamed) {
  for (const Interleaving& interleaving : kInterleavings) {
    StartCase(interleaving);
    emulator::Options options = emulator::CurrentOptions();
    options.fast_forward = true;
    emulator::Configure(options);
    ExchangeSpec spec;
    spec.tokens = {4, 5, 6};
    const ExchangeRun run(spec);
    run.Launch(0, 0);
    run.Launch(1, 0);  // rank 2 is dead
    ASSERT_EQ(runtime::Synchronize(), OkStatus());
    for (int rank = 0; rank < 2; ++rank) {
      const DeviceWaitRecord& record = run.record(rank);
      EXPECT_EQ(CheckDeviceWaitRecord(record).code(), StatusCode::kDeadlineExceeded);
      EXPECT_EQ(record.rank, rank);
      EXPECT_EQ(record.task_kind, 10);
      EXPECT_EQ(record.task, 2) << "the missing rank";
      EXPECT_EQ(record.observed, 0u);
    }
  }
}

}  // namespace
}  // namespace mok::testing
