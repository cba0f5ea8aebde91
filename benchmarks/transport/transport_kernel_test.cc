// The benchmark's kernels between two and three emulated GPUs: every byte, every arrival, races.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "benchmarks/transport/transport_launch.h"
#include "mok_core/emulator/tests/planted_bug.h"
#include "mok_core/emulator/tests/test_support.h"

namespace mok::testing {
namespace {

struct TransportSpec {
  int ranks = 2;
  int rows = 21;  // of each rank's table
  int row_bytes = 80;
  int rows_per_tile = 4;
  int warps = 3;
  uint32_t blocks = 2;
};

// Every rank exchanges with the one after it; row i of its table is a random row there.
class TransportRun {
 public:
  explicit TransportRun(const TransportSpec& spec) : spec_(spec), ranks_(spec.ranks) {
    for (int rank = 0; rank < spec.ranks; ++rank) Allocate(rank);
    for (int rank = 0; rank < spec.ranks; ++rank) Connect(rank);
  }

  void Launch(const TransportLaunch& how) const {
    for (int rank = 0; rank < spec_.ranks; ++rank) {
      TransportLaunch launch = how;
      launch.device = rank;
      launch.num_blocks = spec_.blocks;
      // Pull fills `local` from the peer's source; push the peer's memory from the own source.
      TransportParams params = ranks_[rank].params;
      for (int peer = 0; peer < spec_.ranks; ++peer) {
        params.of_rank[peer] =
            Bytes(how.side == Side::kPull ? ranks_[peer].source : ranks_[peer].destination);
      }
      params.local =
          Bytes(how.side == Side::kPull ? ranks_[rank].destination : ranks_[rank].source);
      EXPECT_EQ(LaunchTransport(params, launch), OkStatus());
    }
  }

  bool Matches(const TransportLaunch& how) const {
    for (int rank = 0; rank < spec_.ranks; ++rank) {
      const int peer = Peer(rank), words = spec_.row_bytes / 4;
      const int reader = how.side == Side::kPull ? rank : peer;
      const int owner = how.side == Side::kPull ? peer : rank;
      const auto copy = HostCopy(ranks_[reader].destination, Words());
      for (int i = 0; i < spec_.rows; ++i) {
        const int there = ranks_[rank].row[i];
        const int to = how.side == Side::kPull ? i : there,
                  from = how.side == Side::kPull ? there : i;
        const uint32_t* expected = ranks_[owner].values.data() + from * words;
        if (std::memcmp(copy.data() + to * words, expected, spec_.row_bytes) != 0) return false;
      }
      const int told = how.arrival == Arrival::kPeer ? peer : rank;
      const auto counters = HostCopy(ranks_[told].params.counters, Tiles());
      const std::vector<uint64_t> expected(Tiles(), how.arrival == Arrival::kNone ? 0 : 1);
      if (counters != expected) return false;
    }
    return true;
  }

 private:
  struct RankState {
    TransportParams params{};
    std::vector<int32_t> row;
    std::vector<uint32_t> values;
    uint32_t* source = nullptr;
    uint32_t* destination = nullptr;
  };

  static std::byte* Bytes(uint32_t* words) { return reinterpret_cast<std::byte*>(words); }
  int Peer(int rank) const { return (rank + 1) % spec_.ranks; }
  size_t Words() const { return static_cast<size_t>(spec_.rows) * spec_.row_bytes / 4; }
  size_t Tiles() const {
    return static_cast<size_t>((spec_.rows + spec_.rows_per_tile - 1) / spec_.rows_per_tile);
  }

  void Allocate(int rank) {
    RankState& state = ranks_[rank];
    std::mt19937 random(rank + 1);
    for (int i = 0; i < spec_.rows; ++i) state.row.push_back(i);
    std::shuffle(state.row.begin(), state.row.end(), random);
    for (size_t i = 0; i < Words(); ++i) {
      state.values.push_back(static_cast<uint32_t>(rank * 1000000 + i));
    }
    state.source = DeviceArray(state.values, "source", rank);
    state.destination = UninitializedArray<uint32_t>(Words(), "destination", rank);
    TransportParams& p = state.params;
    p.rank = DeviceArray(std::vector<int32_t>(spec_.rows, Peer(rank)), "rank", rank);
    p.row = DeviceArray(state.row, "row", rank);
    p.row_bytes = spec_.row_bytes;
    p.num_rows = spec_.rows;
    p.rows_per_tile = spec_.rows_per_tile;
    p.warps = spec_.warps;
    p.counters = DeviceArray(std::vector<uint64_t>(Tiles(), 0), "counters", rank);
    void* record = runtime::AllocateMappedHost(sizeof(DeviceWaitRecord), "record").value();
    uint32_t* abort = DeviceArray(std::vector<uint32_t>{0}, "abort", rank);
    p.wait = {static_cast<DeviceWaitRecord*>(record), abort, 1'000'000'000, rank};
  }

  void Connect(int rank) {
    for (int peer = 0; peer < spec_.ranks; ++peer) {
      if (peer != rank) MOK_CHECK(runtime::EnablePeerAccess(rank, peer).ok());
      ranks_[rank].params.counters_of_rank[peer] = ranks_[peer].params.counters;
    }
  }

  TransportSpec spec_;
  std::vector<RankState> ranks_;
};

void ExpectMoved(const TransportSpec& spec, const std::string& label) {
  for (int which = 0; which < 12; ++which) {
    const TransportLaunch how = {static_cast<Mechanism>(which % 2),
                                 static_cast<Side>(which / 2 % 2), static_cast<Arrival>(which / 4)};
    for (const Interleaving& interleaving : kInterleavings) {
      StartCase(interleaving);
      const TransportRun run(spec);
      run.Launch(how);
      const Outcome outcome = RunAndCompare([&] { return run.Matches(how); });
      EXPECT_EQ(outcome.kind, "ok") << label << ", variant " << which << outcome.text;
    }
  }
}

TEST(TransportTest, EveryVariantMovesAndTells) { ExpectMoved(TransportSpec{}, "small rows"); }

TEST(TransportTest, LongRowsAndThreeRanks) {
  TransportSpec spec;
  spec.ranks = 3;
  spec.rows = 3;
  spec.row_bytes = 2 * kTransportChunkBytes + 16;
  spec.rows_per_tile = 2;
  spec.warps = 1;
  ExpectMoved(spec, "long rows");
}

TEST(TransportTest, ImpossibleParametersAreNamed) {
  TransportParams params{};
  params.row_bytes = 24;
  const TransportLaunch launch{};
  Status status = LaunchTransport(params, launch);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("row_bytes = 24"), std::string::npos);
  params.row_bytes = 32;
  params.rows_per_tile = 1;
  params.warps = kTransportWarps + 1;
  status = LaunchTransport(params, launch);
  EXPECT_NE(status.message().find("warps = 17"), std::string::npos);
}

TEST(PingPongTest, EveryRoundIsAnswered) {
  for (const Interleaving& interleaving : kInterleavings) {
    StartCase(interleaving);
    PingPongParams params[2] = {};
    for (int rank = 0; rank < 2; ++rank) {
      MOK_CHECK(runtime::EnablePeerAccess(rank, 1 - rank).ok());
      params[rank].own_flag = DeviceArray(std::vector<uint64_t>{0}, "flag", rank);
      void* record = runtime::AllocateMappedHost(sizeof(DeviceWaitRecord), "record").value();
      uint32_t* abort = DeviceArray(std::vector<uint32_t>{0}, "abort", rank);
      params[rank].wait = {static_cast<DeviceWaitRecord*>(record), abort, 1'000'000'000, rank};
      params[rank].rounds = 5;
      params[rank].begins = rank == 0;
    }
    for (int rank = 0; rank < 2; ++rank) {
      params[rank].peer_flag = params[1 - rank].own_flag;
      EXPECT_EQ(LaunchPingPong(params[rank], rank, nullptr), OkStatus());
    }
    const Outcome outcome = RunAndCompare([&] {
      return HostCopy(params[0].own_flag, 1)[0] == 5 && HostCopy(params[1].own_flag, 1)[0] == 5;
    });
    EXPECT_EQ(outcome.kind, "ok") << outcome.text;
  }
}

}  // namespace
}  // namespace mok::testing
