// Pull and push of rows by one warp: bulk copies between peers' memory and the ring through one
// chunk of staging in shared memory.
//
// Measured on two H200: one chunk of 7 KiB per SM, in a warp beside the GEMM, saturates the link.
// While the first chunk of a tile is loaded, the stores of the tile before it become visible and
// are signalled, so that the release costs no time of its own.
#pragma once

#include "mok_comm/sm90/exchange_params.h"
#include "mok_comm/sm90/scalar_mover.h"
#include "mok_core/device/device.h"
#include "mok_core/device/wait.h"

namespace mok {

// An equal part of the rows of a row block, with what to wait for and whom to tell.
struct ExchangeTile {
  static constexpr int kMaxWaits = 2;
  static constexpr int kMaxSignals = 2;

  int32_t table_row;  // first row in RowSources
  int32_t local_row;  // first row in RowExchange::local
  int32_t rows;       // may be 0: waits and signals only
  int32_t num_waits;
  int32_t num_signals;
  int32_t wait_counters[kMaxWaits];  // of this GPU's counters
  uint64_t wait_targets[kMaxWaits];
  int32_t signals[kMaxSignals];  // counters: incremented by 1 once the rows are visible
};

enum class Direction : int32_t { kPull, kPush };

// A warp's staging.
struct StagingChunk {
  unsigned char* memory;  // shared, 128-byte aligned
  uint64_t* full;         // barrier of one arrival: bulk load -> this warp; parity 0 comes first
  uint32_t bytes;         // of memory; a multiple of 16
};

// Moves tile after tile. All lanes of the warp call every function together; lane 0 issues.
template <Direction kDirection, ExchangeBug kBug = ExchangeBug::kNone>
class RowMover {
 public:
  // counters: device memory; tiles refer to them by index.
  MOK_DEVICE RowMover(uint64_t* counters, const StagingChunk& chunk)
      : counters_(counters), chunk_(chunk), lane_(static_cast<int>(ThreadIndex().x) % 32) {}

  // Waits for the tile's counters. False: the grid is aborted.
  MOK_DEVICE bool Await(const ExchangeTile& tile, const DeviceWait& wait) {
    bool ready = true;
    if (lane_ == 0) {
      if (kBug != ExchangeBug::kSkipTileWait && !Ready(tile)) {
        // What this tile waits for may itself wait for the one before.
        SignalPending();
        MOK_UNROLL
        for (int i = 0; i < ExchangeTile::kMaxWaits; ++i) {
          if (i < tile.num_waits && ready) {
            ready = wait.ForCounterGpu(counters_ + tile.wait_counters[i], tile.wait_targets[i]);
          }
        }
      }
      if (kBug != ExchangeBug::kNoFenceAfterWait) FenceProxyAsyncGlobal();
    }
    return Shuffle(ready ? 1 : 0, 0) != 0;
  }

  // Issues the rows of a tile whose counters have been awaited, and moves their scalars (of
  // scalar_mover.h). The tile is signalled by the next Move or Flush.
  template <class Scalars>
  MOK_DEVICE void Move(const RowExchange& exchange, const ExchangeTile& tile, Scalars scalars,
                       const DeviceWait& wait) {
    SyncWarp();  // what lane 0 has acquired
    for (int first = 0; first < tile.rows; first += 32) {
      const int rest = tile.rows - first, count = rest < 32 ? rest : 32;
      ScalarRow row = {tile.local_row + first + lane_, 0, 0};
      if (lane_ < count) {
        row.rank = LoadNonCoherent(exchange.sources.rank + tile.table_row + first + lane_);
        row.route = LoadNonCoherent(exchange.sources.route + tile.table_row + first + lane_);
        scalars.Begin(row);
      }
      for (int i = 0; i < count; ++i) {
        const ScalarRow at = {tile.local_row + first + i, Shuffle(row.rank, i),
                              Shuffle(row.route, i)};
        if (lane_ == 0) MoveRow(exchange, at, wait);
      }
      if (lane_ < count) scalars.End(row);
    }
    SyncWarp();  // lane 0 releases what all lanes have stored
    if (lane_ == 0) {
      SignalPending();  // of a tile before an empty one
      num_pending_ = tile.num_signals;
      MOK_UNROLL
      for (int i = 0; i < ExchangeTile::kMaxSignals; ++i) pending_[i] = tile.signals[i];
    }
  }

  // Everything moved so far is visible and signalled. Before the warp does other work, or ends.
  MOK_DEVICE void Flush() {
    if (lane_ == 0) {
      if (kBug != ExchangeBug::kNoFlushAtEnd) SignalPending();
      BulkWaitGroup<0>();
    }
    SyncWarp();
  }

 private:
  static constexpr bool kIsPull = kDirection == Direction::kPull;
  static constexpr uint64_t kBurstChunks = 4;  // that may catch up with the pace after a wait

  MOK_DEVICE bool Ready(const ExchangeTile& tile) const {
    bool ready = true;
    MOK_UNROLL
    for (int i = 0; i < ExchangeTile::kMaxWaits; ++i) {
      if (i < tile.num_waits) {
        ready = LoadAcquireGpu(counters_ + tile.wait_counters[i]) >= tile.wait_targets[i] && ready;
      }
    }
    return ready;
  }

  MOK_DEVICE void MoveRow(const RowExchange& exchange, const ScalarRow& row,
                          const DeviceWait& wait) {
    const int64_t row_bytes = exchange.peers.row_bytes;
    const int32_t peer_row =
        kBug == ExchangeBug::kTokenAsRoute ? row.route : row.route / exchange.routes_per_row;
    std::byte* peer = exchange.peers.of_rank[row.rank] + peer_row * row_bytes;
    std::byte* local = exchange.local + row.local_row * row_bytes;
    std::byte* source = kIsPull ? peer : local;
    std::byte* destination = kIsPull ? local : peer;
    const bool paced = !kIsPull && exchange.interval_ns != 0 && row.rank != exchange.own_rank;
    for (int64_t offset = 0; offset < row_bytes; offset += chunk_.bytes) {
      const int64_t rest = row_bytes - offset;
      const bool whole = rest >= chunk_.bytes || kBug == ExchangeBug::kChunkPastRow;
      const uint32_t bytes = whole ? chunk_.bytes : static_cast<uint32_t>(rest);
      if (kBug != ExchangeBug::kNoReadWait) BulkWaitGroupRead<0>();
      MbarrierArriveExpectTransaction(chunk_.full, bytes);
      BulkLoad(chunk_.memory, source + offset, bytes, chunk_.full);
      SignalPending();
      if (kBug != ExchangeBug::kNoFullWait) wait.ForBarrier(chunk_.full, parity_);
      parity_ ^= 1;
      if (paced) Pace(exchange.interval_ns);
      BulkStore(destination + offset, chunk_.memory, bytes);
      BulkCommitGroup();
    }
  }

  // Signals the tile before, once its stores are visible.
  MOK_DEVICE void SignalPending() {
    if (num_pending_ == 0) return;
    if (kBug == ExchangeBug::kSignalBeforeWritten) {
      BulkWaitGroupRead<0>();
    } else {
      BulkWaitGroup<0>();
    }
    MOK_UNROLL
    for (int i = 0; i < ExchangeTile::kMaxSignals; ++i) {
      if (i >= num_pending_) continue;
      if (kBug == ExchangeBug::kRelaxedSignal) {
        ReduceAddRelaxedGpu(counters_ + pending_[i], uint64_t{1});
      } else {
        ReduceAddReleaseGpu(counters_ + pending_[i], uint64_t{1});
      }
    }
    num_pending_ = 0;
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
  StagingChunk chunk_;
  int lane_;
  uint32_t parity_ = 0;
  int32_t num_pending_ = 0;  // lane 0: signals of the last tile, not yet given
  int32_t pending_[ExchangeTile::kMaxSignals] = {};
  uint64_t next_time_ = 0;
};

}  // namespace mok
