// Pull and push of rows by one warp: bulk copies between peers' memory and the ring through chunks
// of staging in shared memory.
//
// Each of the first kStagingChunks lanes moves a chunk of its own, in step with the others: load,
// wait, store. While the first chunks of a tile are loaded, the stores of the tile before it become
// visible and are signalled, so that the release costs no time of its own.
#pragma once

#include "mok_comm/sm90/exchange_params.h"
#include "mok_comm/sm90/scalar_mover.h"
#include "mok_core/bits.h"
#include "mok_core/device/device.h"
#include "mok_core/device/pipeline.h"
#include "mok_core/device/wait.h"

namespace mok {

// An equal part of the rows of a row block, with what to wait for and whom to tell.
struct ExchangeTile {
  static constexpr int kMaxWaits = 2;
  static constexpr int kMaxSignals = 2;

  int32_t table_row;  // first row in RowSources
  int32_t local_row;  // first row in RowExchange::local
  // Valid rows: padding, -1 in RowSources, is not among them, since it would index PeerRows. May be
  // 0: waits and signals only.
  int32_t rows;
  int32_t num_waits;
  int32_t num_signals;
  // Pull: the rows before the tile's that have come in lie as far from them in the ring as in the
  // table, and stay there. The n-th block before the tile's signals counter signals[0] - n.
  bool may_copy;
  int32_t wait_counters[kMaxWaits];  // of this GPU's counters
  uint64_t wait_targets[kMaxWaits];
  int32_t signals[kMaxSignals];  // counters: incremented by 1 once the rows are visible
};

enum class Direction : int32_t { kPull, kPush };

// A warp's staging.
inline constexpr int kStagingChunks = 2;
struct StagingChunks {
  unsigned char* memory;  // shared: the chunks, `stride` bytes apart, each 128-byte aligned
  uint64_t* full;         // [kStagingChunks] barriers of one arrival: bulk load -> a lane
  uint32_t bytes;         // used of a chunk; a multiple of 16
  uint32_t stride;
};

// Moves tile after tile. All lanes of the warp call every function together. The direction is no
// template argument: a block has warps of both, which share their instructions.
template <ExchangeBug kBug = ExchangeBug::kNone>
class RowMover {
 public:
  // counters: device memory; tiles refer to them by index. pulling: a barrier in shared memory, of
  // one arrival, whose phase is odd while the block's pull warp moves rows; its push warp looks at
  // it. Null: each goes its way.
  MOK_DEVICE RowMover(Direction direction, uint64_t* counters, const StagingChunks& staging,
                      uint64_t* pulling = nullptr)
      : counters_(counters),
        staging_(staging),
        pulling_(pulling),
        is_pull_(direction == Direction::kPull),
        lane_(static_cast<int>(ThreadIndex().x) % 32),
        moves_(lane_ < kStagingChunks) {
    MOK_EXPECT(staging.bytes % 16 == 0 && staging.bytes <= staging.stride);
    if (!moves_) return;
    chunk_ = staging.memory + lane_ * staging.stride;
    full_ = staging.full + lane_;
  }

  // Waits for the tile's counters, and orders what they acquired before the bulk loads of Move.
  // False: the grid is aborted. A tile without waits gets no proxy fence: if its rows were written
  // while the kernel runs, the warp has to have executed FenceProxyAsyncGlobal since it acquired
  // them.
  MOK_DEVICE bool Await(const ExchangeTile& tile, const DeviceWait& wait) {
    if (HasAcquired(tile)) return true;
    bool ready = kBug == ExchangeBug::kSkipTileWait || Ready(tile);
    if (!ready) {
      ShowPulling(false);
      SignalPending();  // what this tile waits for may itself wait for the one before
      ready = AwaitCounters(tile, wait);
    }
    SyncWarp();  // what lane 0 has acquired
    if (kBug != ExchangeBug::kNoFenceAfterWait && moves_) FenceProxyAsyncGlobal();
    acquired_counter_ = tile.wait_counters[0];
    acquired_target_ = tile.wait_targets[0];
    return ready;
  }

  // Issues the rows of a tile whose counters have been awaited, and moves their scalars (of
  // scalar_mover.h). The tile is signalled by the next Move or Flush.
  template <class Scalars>
  MOK_DEVICE void Move(const RowExchange& exchange, const ExchangeTile& tile, Scalars scalars,
                       const DeviceWait& wait) {
    SyncWarp();
    ShowPulling(true);
    for (int first = 0; first < tile.rows; first += 32) {
      const int rest = tile.rows - first, count = rest < 32 ? rest : 32;
      ScalarRow row = {tile.local_row + first + lane_, 0, 0};
      if (lane_ < count) {
        row.rank = LoadNonCoherent(exchange.sources.rank + tile.table_row + first + lane_);
        row.route = LoadNonCoherent(exchange.sources.route + tile.table_row + first + lane_);
        MOK_EXPECT(row.rank >= 0);  // no padding
        scalars.Begin(row);
      }
      std::byte* peer = PeerRow(exchange, row);
      if (is_pull_ && tile.may_copy && exchange.earlier.of_token != nullptr) {
        peer = CopiedRow(exchange, tile, row, lane_ < count, peer);
      }
      MoveLaneRows(exchange, row, peer, count, wait);
      if (lane_ < count) scalars.End(row);
    }
    SignalPending();  // of a tile before an empty one
    num_pending_ = tile.num_signals;
    MOK_UNROLL
    for (int i = 0; i < ExchangeTile::kMaxSignals; ++i) pending_[i] = tile.signals[i];
  }

  // After Flush: moves rows the other way from here on.
  MOK_DEVICE void Turn(Direction direction) { is_pull_ = direction == Direction::kPull; }

  // Everything moved so far is visible and signalled. Before the warp does other work, or ends.
  MOK_DEVICE void Flush() {
    if (kBug != ExchangeBug::kStaysPulling) ShowPulling(false);
    if (kBug != ExchangeBug::kNoFlushAtEnd) SignalPending();
    if (moves_) BulkWaitGroup<0>();
    SyncWarp();
  }

 private:
  static constexpr uint64_t kBurstChunks = 4;  // that may catch up with the pace after a wait

  // The tile's one wait is one that the warp has seen fulfilled: counters only grow.
  MOK_DEVICE bool HasAcquired(const ExchangeTile& tile) const {
    return tile.num_waits == 0 ||
           (tile.num_waits == 1 && tile.wait_counters[0] == acquired_counter_ &&
            tile.wait_targets[0] <= acquired_target_);
  }

  MOK_DEVICE bool Ready(const ExchangeTile& tile) const {
    bool ready = true;
    if (lane_ == 0) {
      MOK_UNROLL
      for (int i = 0; i < ExchangeTile::kMaxWaits; ++i) {
        if (i >= tile.num_waits) continue;
        ready = LoadAcquireGpu(counters_ + tile.wait_counters[i]) >= tile.wait_targets[i] && ready;
      }
    }
    return Shuffle(ready ? 1 : 0, 0) != 0;
  }

  MOK_DEVICE bool AwaitCounters(const ExchangeTile& tile, const DeviceWait& wait) const {
    bool ready = true;
    if (lane_ == 0) {
      for (int i = 0; i < tile.num_waits && ready; ++i) {
        ready = wait.ForCounterGpu(counters_ + tile.wait_counters[i], tile.wait_targets[i]);
      }
    }
    return Shuffle(ready ? 1 : 0, 0) != 0;
  }

  // At the other end of the link, or this rank's own.
  MOK_DEVICE std::byte* PeerRow(const RowExchange& exchange, const ScalarRow& row) const {
    const int32_t peer_row =
        kBug == ExchangeBug::kTokenAsRoute ? row.route : row.route / exchange.routes_per_row;
    return exchange.peers.of_rank[row.rank] + peer_row * exchange.peers.row_bytes;
  }

  // All lanes. `peer`, or, of a row of another rank, the token's first row in the ring if that has
  // come in with an earlier block: nobody waits for it.
  MOK_DEVICE std::byte* CopiedRow(const RowExchange& exchange, const ExchangeTile& tile,
                                  const ScalarRow& row, bool is_row, std::byte* peer) const {
    std::byte* found = peer;
    if (is_row && row.rank != exchange.own_rank) {
      const EarlierRows& earlier = exchange.earlier;
      const int64_t token = row.rank * earlier.max_tokens + row.route / exchange.routes_per_row;
      const int32_t first = LoadNonCoherent(earlier.of_token + token);
      const int32_t table_row = tile.table_row + row.local_row - tile.local_row;
      const int32_t blocks =
          (table_row >> earlier.log2_block_rows) - (first >> earlier.log2_block_rows);
      const uint64_t* counter = counters_ + tile.signals[0] - blocks;
      const auto target = static_cast<uint64_t>(earlier.tiles_per_block);
      if (blocks > 0 &&
          (LoadAcquireGpu(counter) >= target || kBug == ExchangeBug::kCopiesTooEarly)) {
        found = exchange.local + (row.local_row - (table_row - first)) * exchange.peers.row_bytes;
      }
    }
    if (Ballot(found != peer) == 0) return peer;
    SyncWarp();  // what each lane has acquired
    if (kBug != ExchangeBug::kNoFenceBeforeCopy && moves_) FenceProxyAsyncGlobal();
    return found;
  }

  // Up to 32 rows; lane l knows the l-th and where it comes from or goes to. Chunks of the rows
  // that are moved follow each other; mover l takes chunks l, l + kStagingChunks, ...
  MOK_DEVICE void MoveLaneRows(const RowExchange& exchange, const ScalarRow& lane_row,
                               const std::byte* peer_row, int count, const DeviceWait& wait) {
    const int64_t row_bytes = exchange.peers.row_bytes;
    const auto lane_peer = reinterpret_cast<uint64_t>(peer_row);
    const bool is_paced =
        !is_pull_ && exchange.interval_ns != 0 && lane_row.rank != exchange.own_rank;
    const uint32_t paced_rows = Ballot(is_paced);
    const bool skips = !is_pull_ && exchange.skips_own_rank && kBug != ExchangeBug::kMovesOwnRows &&
                       lane_row.rank == exchange.own_rank;
    const uint32_t moved_rows = Ballot(lane_ < count && !skips);
    std::byte* local = exchange.local + (lane_row.local_row - lane_) * row_bytes;
    const int row_chunks =
        CeilDiv(static_cast<int32_t>(row_bytes), static_cast<int32_t>(staging_.bytes));
    int row = NextRow(moved_rows, 0), chunk = lane_ % kStagingChunks;
    for (;; chunk += kStagingChunks) {
      for (; chunk >= row_chunks; chunk -= row_chunks) row = NextRow(moved_rows, row + 1);
      const bool active = moves_ && row < 32;
      if (Ballot(active) == 0) break;
      const int64_t offset = int64_t{chunk} * staging_.bytes, rest = row_bytes - offset;
      const bool whole = rest >= staging_.bytes || kBug == ExchangeBug::kChunkPastRow;
      const uint32_t size = whole ? staging_.bytes : static_cast<uint32_t>(rest);
      auto* peer = reinterpret_cast<std::byte*>(Shuffle(lane_peer, row % 32)) + offset;
      std::byte* own = local + row * row_bytes + offset;
      if (active) Load(is_pull_ ? peer : own, size);
      SignalPending();
      if (!active) continue;
      if (kBug != ExchangeBug::kNoFullWait) wait.ForBarrier(full_, parity_);
      parity_ ^= 1;
      if (paced_rows >> row & 1u) Pace(Interval(exchange) * kStagingChunks);
      BulkStore(is_pull_ ? own : peer, chunk_, size);
      BulkCommitGroup();
    }
  }

  // The first row from `row` on whose bit is set; at least 32: none.
  MOK_DEVICE static int NextRow(uint32_t rows, int row) {
    while (row < 32 && (rows >> row & 1u) == 0) ++row;
    return row;
  }

  MOK_DEVICE void Load(const std::byte* source, uint32_t bytes) {
    if (kBug != ExchangeBug::kNoReadWait) BulkWaitGroupRead<0>();
    MbarrierArriveExpectTransaction(full_, bytes);
    BulkLoad(chunk_, source, bytes, full_);
  }

  // Signals the tile before, once its stores are visible.
  MOK_DEVICE void SignalPending() {
    if (num_pending_ == 0) return;
    if (moves_) {
      if (kBug == ExchangeBug::kSignalBeforeWritten) {
        BulkWaitGroupRead<0>();
      } else {
        BulkWaitGroup<0>();
      }
    }
    // What all lanes have moved, scalars included.
    if (kBug != ExchangeBug::kSignalWithoutSync) SyncWarp();
    if (lane_ == 0) {
      MOK_UNROLL
      for (int i = 0; i < ExchangeTile::kMaxSignals; ++i) {
        if (i >= num_pending_) continue;
        if (kBug == ExchangeBug::kRelaxedSignal) {
          ReduceAddRelaxedGpu(counters_ + pending_[i], uint64_t{1});
        } else {
          ReduceAddReleaseGpu(counters_ + pending_[i], uint64_t{1});
        }
      }
    }
    num_pending_ = 0;
  }

  MOK_DEVICE void ShowPulling(bool pulls) {
    if (!is_pull_ || pulling_ == nullptr || pulls == shows_pulling_) return;
    shows_pulling_ = pulls;
    if (lane_ != 0) return;
    MbarrierArrive(pulling_);
    // Over at once; compute-sanitizer's synccheck misses it otherwise.
    SpinWait().ForBarrier(pulling_, pulls ? 0 : 1);
  }

  // Pulls of this GPU and pushes of its peer share a direction of the link. Who pulls has been
  // waited for, or soon is; the pushes have time until the pass ends.
  MOK_DEVICE uint64_t Interval(const RowExchange& exchange) const {
    const uint64_t beside_pulls = exchange.interval_beside_pulls_ns;
    const bool slows = beside_pulls != 0 && pulling_ != nullptr && MbarrierTestWait(pulling_, 0);
    return slows ? beside_pulls : exchange.interval_ns;
  }

  // Stores that are posted faster than the link takes them fill the queues that the GEMM's loads
  // need as well; loads from peers throttle themselves.
  MOK_DEVICE void Pace(uint64_t interval) {
    const uint64_t burst = kBurstChunks * interval;
    uint64_t now = GlobalTimer();
    if (next_time_ + burst < now) next_time_ = now - burst;
    for (; now < next_time_; now = GlobalTimer()) NanoSleep(64);
    next_time_ += interval;
  }

  uint64_t* counters_;
  StagingChunks staging_;
  uint64_t* pulling_;
  bool shows_pulling_ = false;
  bool is_pull_;
  int lane_;
  bool moves_;                      // this lane has a chunk:
  unsigned char* chunk_ = nullptr;  // its own
  uint64_t* full_ = nullptr;
  uint32_t parity_ = 0;
  uint64_t next_time_ = 0;
  // The same in all lanes.
  int32_t acquired_counter_ = -1;  // a wait that has been fulfilled
  uint64_t acquired_target_ = 0;
  int32_t num_pending_ = 0;  // signals of the last tile, not yet given
  int32_t pending_[ExchangeTile::kMaxSignals] = {};
};

}  // namespace mok
