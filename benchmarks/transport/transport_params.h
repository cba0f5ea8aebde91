// What the kernels of the transport benchmark are given. Shared by host and device code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mok_core/device/wait_record.h"

namespace mok {

// How a warp moves a row.
enum class Mechanism : int32_t {
  kBulk,    // bulk copies (TMA) through one chunk of shared memory: one lane, no registers
  kVector,  // 16-byte loads and stores of all lanes through registers
  kCount
};

// Which side's SMs work.
enum class Side : int32_t {
  kPull,  // the reader's: rows of peers -> own memory
  kPush,  // the owner's: own rows -> memory of peers
  kCount
};

// What is told to whom when a tile of rows has arrived.
enum class Arrival : int32_t {
  kNone,
  kOwnGpu,  // a counter of this GPU: what a pull needs
  kPeer,    // a counter of the GPU that now has the rows: what a push needs if that GPU is to
            // compute before the pass ends
  kCount
};

inline constexpr int kMaxTransportRanks = 8;
inline constexpr int kTransportWarps = 16;  // of a block; params.warps of them work
inline constexpr uint32_t kTransportChunkBytes = 7168;

// A table of rows; row i is in the table's rank, and in this GPU's `local`.
struct TransportParams {
  const int32_t* rank;                     // [num_rows]
  const int32_t* row;                      // [num_rows] row in that rank's memory
  std::byte* of_rank[kMaxTransportRanks];  // [rows there, row_bytes]: pull: read; push: written
  std::byte* local;                        // [num_rows, row_bytes]: pull: written; push: read
  int64_t row_bytes;                       // a multiple of 16
  int32_t num_rows;
  int32_t rows_per_tile;                           // a warp moves a tile; its rows are of one rank
  int32_t warps;                                   // of each block, 1 to kTransportWarps
  uint64_t* counters;                              // [tiles] of this GPU: + 1 on arrival
  uint64_t* counters_of_rank[kMaxTransportRanks];  // [tiles] of the others
  DeviceWaitParams wait;
};

// A flag that goes back and forth between two GPUs.
struct PingPongParams {
  uint64_t* own_flag;  // written by the peer, with the number of the round; 0 at first
  uint64_t* peer_flag;
  int32_t rounds;
  int32_t begins;  // 1 on one of the two
  DeviceWaitParams wait;
};

}  // namespace mok
