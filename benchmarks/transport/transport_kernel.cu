#include "benchmarks/transport/transport_kernel.h"

#include "mok_core/device/device.h"
#include "mok_core/device/wait.h"

namespace mok {
namespace {

struct alignas(128) SharedStorage {
  unsigned char chunks[kTransportWarps][kTransportChunkBytes];
  uint64_t full[kTransportWarps];  // bulk load -> the warp; one arrival, parity 0 comes first
};

// Both ends of a table's row.
struct RowEnds {
  std::byte* from;
  std::byte* to;
};

template <Side kSide>
MOK_DEVICE RowEnds EndsOf(const TransportParams& p, int32_t index) {
  const int32_t rank = LoadNonCoherent(p.rank + index), row = LoadNonCoherent(p.row + index);
  std::byte* peer = p.of_rank[rank] + row * p.row_bytes;
  std::byte* local = p.local + index * p.row_bytes;
  return kSide == Side::kPull ? RowEnds{peer, local} : RowEnds{local, peer};
}

// Tells that a tile has arrived: everything the calling thread knows to be written is visible to
// who sees the counter.
template <Arrival kArrival>
MOK_DEVICE void Tell(const TransportParams& p, int32_t tile) {
  if (kArrival == Arrival::kOwnGpu) ReduceAddReleaseGpu(p.counters + tile, uint64_t{1});
  if (kArrival == Arrival::kPeer) {
    const int32_t rank = LoadNonCoherent(p.rank + tile * p.rows_per_tile);
    ReduceAddReleaseSys(p.counters_of_rank[rank] + tile, uint64_t{1});
  }
}

// One lane moves rows through one chunk. A tile is told once its stores are complete, while the
// first chunk of the next is loaded.
template <Side kSide, Arrival kArrival>
class BulkMover {
 public:
  MOK_DEVICE BulkMover(const TransportParams& p, unsigned char* chunk, uint64_t* full)
      : p_(&p), wait_(p.wait, 0), chunk_(chunk), full_(full) {}

  MOK_DEVICE void Move(int32_t tile, int32_t begin, int32_t end) {
    for (int32_t index = begin; index < end; ++index) {
      const RowEnds ends = EndsOf<kSide>(*p_, index);
      for (int64_t offset = 0; offset < p_->row_bytes; offset += kTransportChunkBytes) {
        const int64_t rest = p_->row_bytes - offset;
        const auto bytes = static_cast<uint32_t>(
            rest < static_cast<int64_t>(kTransportChunkBytes) ? rest : kTransportChunkBytes);
        BulkWaitGroupRead<0>();
        MbarrierArriveExpectTransaction(full_, bytes);
        BulkLoad(chunk_, ends.from + offset, bytes, full_);
        TellPending();
        wait_.ForBarrier(full_, parity_);
        parity_ ^= 1;
        BulkStore(ends.to + offset, chunk_, bytes);
        BulkCommitGroup();
      }
    }
    pending_ = tile;
  }

  MOK_DEVICE void Finish() {
    TellPending();
    BulkWaitGroup<0>();
  }

 private:
  MOK_DEVICE void TellPending() {
    if (kArrival == Arrival::kNone || pending_ < 0) return;
    BulkWaitGroup<0>();
    Tell<kArrival>(*p_, pending_);
    pending_ = -1;
  }

  const TransportParams* p_;
  DeviceWait wait_;
  unsigned char* chunk_;
  uint64_t* full_;
  uint32_t parity_ = 0;
  int32_t pending_ = -1;
};

// All lanes move one row; kUnroll loads of each are in flight.
MOK_DEVICE void MoveRowByVectors(const RowEnds& ends, int32_t words, int lane) {
  constexpr int kUnroll = 8;
  const auto* from = reinterpret_cast<const Word4*>(ends.from);
  auto* to = reinterpret_cast<Word4*>(ends.to);
  for (int32_t begin = lane; begin < words; begin += 32 * kUnroll) {
    Word4 values[kUnroll];
    MOK_UNROLL
    for (int i = 0; i < kUnroll; ++i) {
      if (begin + 32 * i < words) values[i] = LoadVectorStreaming(from + begin + 32 * i);
    }
    MOK_UNROLL
    for (int i = 0; i < kUnroll; ++i) {
      if (begin + 32 * i < words) StoreVectorStreaming(to + begin + 32 * i, values[i]);
    }
  }
}

// The tiles of a warp: every (blocks * warps)th.
struct WarpTiles {
  MOK_DEVICE explicit WarpTiles(const TransportParams& p)
      : num_tiles((p.num_rows + p.rows_per_tile - 1) / p.rows_per_tile),
        first(static_cast<int32_t>(BlockIndex().x) * p.warps +
              static_cast<int32_t>(ThreadIndex().x) / 32),
        step(static_cast<int32_t>(GridDimensions().x) * p.warps) {}

  int32_t num_tiles, first, step;
};

MOK_DEVICE int32_t EndOfTile(const TransportParams& p, int32_t tile) {
  const int32_t end = (tile + 1) * p.rows_per_tile;
  return end < p.num_rows ? end : p.num_rows;
}

template <Mechanism kMechanism, Side kSide, Arrival kArrival>
MOK_KERNEL(32 * kTransportWarps, 1)
Transport(MOK_GRID_CONSTANT(TransportParams) p) {
  MOK_SHARED_STORAGE(SharedStorage, s);
  const int warp = static_cast<int>(ThreadIndex().x) / 32;
  const int lane = static_cast<int>(ThreadIndex().x) % 32;
  if (lane == 0) {
    MbarrierInit(&s.full[warp], 1);
    MOK_NAME(&s.full[warp], "full", warp);
    FenceMbarrierInit();
  }
  SyncBlock();
  if (warp >= p.warps) return;
  const WarpTiles tiles(p);
  if constexpr (kMechanism == Mechanism::kBulk) {
    if (lane != 0) return;
    BulkMover<kSide, kArrival> mover(p, s.chunks[warp], &s.full[warp]);
    for (int32_t tile = tiles.first; tile < tiles.num_tiles; tile += tiles.step) {
      mover.Move(tile, tile * p.rows_per_tile, EndOfTile(p, tile));
    }
    mover.Finish();
  } else {
    for (int32_t tile = tiles.first; tile < tiles.num_tiles; tile += tiles.step) {
      for (int32_t i = tile * p.rows_per_tile; i < EndOfTile(p, tile); ++i) {
        MoveRowByVectors(EndsOf<kSide>(p, i), static_cast<int32_t>(p.row_bytes / 16), lane);
      }
      SyncWarp();  // what the lanes have stored, lane 0 may tell
      if (lane == 0) Tell<kArrival>(p, tile);
    }
  }
}

MOK_KERNEL(32, 1)
PingPong(MOK_GRID_CONSTANT(PingPongParams) p) {
  if (ThreadIndex().x != 0) return;
  DeviceWait wait(p.wait, 1);
  for (int32_t round = 1; round <= p.rounds; ++round) {
    wait.SetTask(0, round);
    if (p.begins != 0) StoreReleaseSys(p.peer_flag, static_cast<uint64_t>(round));
    if (!wait.ForCounterSys(p.own_flag, static_cast<uint64_t>(round))) return;
    if (p.begins == 0) StoreReleaseSys(p.peer_flag, static_cast<uint64_t>(round));
  }
}

template <class Kernel>
const void* AddressOf(Kernel* kernel) {
  return reinterpret_cast<const void*>(kernel);
}

template <Mechanism kMechanism, Side kSide>
const void* KernelOf(Arrival arrival) {
  switch (arrival) {
    case Arrival::kOwnGpu:
      return AddressOf(&Transport<kMechanism, kSide, Arrival::kOwnGpu>);
    case Arrival::kPeer:
      return AddressOf(&Transport<kMechanism, kSide, Arrival::kPeer>);
    default:
      return AddressOf(&Transport<kMechanism, kSide, Arrival::kNone>);
  }
}

}  // namespace

const void* TransportKernel(Mechanism mechanism, Side side, Arrival arrival) {
  const bool pull = side == Side::kPull;
  if (mechanism == Mechanism::kBulk) {
    return pull ? KernelOf<Mechanism::kBulk, Side::kPull>(arrival)
                : KernelOf<Mechanism::kBulk, Side::kPush>(arrival);
  }
  return pull ? KernelOf<Mechanism::kVector, Side::kPull>(arrival)
              : KernelOf<Mechanism::kVector, Side::kPush>(arrival);
}

size_t TransportSharedBytes() { return sizeof(SharedStorage); }

const void* PingPongKernel() { return AddressOf(&PingPong); }

}  // namespace mok
