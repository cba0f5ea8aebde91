// What the exchange roles of a kernel are given. Shared by host and device code; parts of a
// kernel's parameters.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mok_core/macros.h"

namespace mok {

// Ranks of one NVLink domain.
inline constexpr int kMaxExchangeRanks = 72;

// A matrix of rows on every rank, mapped into this rank's address space.
struct PeerRows {
  std::byte* of_rank[kMaxExchangeRanks];  // [rows of that rank, row_bytes], 16-byte aligned
  int64_t row_bytes;                      // a multiple of 16
};

// Where a row of the routing table comes from and goes to; device memory, constant while the kernel
// runs.
struct RowSources {
  const int32_t* rank;   // [rows] rank that holds the token; -1: padding, which no tile may contain
  const int32_t* route;  // [rows] token * topk + k there
};

// The rows of tokens that have come in before. All rows of a token hold the same values, so one
// that is already here need not cross a link again.
struct EarlierRows {
  const int32_t* of_token;  // [ranks, max_tokens] first row in the table; null: nothing is copied
  int64_t max_tokens;
  int32_t log2_block_rows;
  int32_t tiles_per_block;  // which signal that their rows are there
};

// Rows of one matrix in one direction.
struct RowExchange {
  RowSources sources;
  PeerRows peers;          // pull: rows of tokens, read; push: rows of routes, written
  std::byte* local;        // [ring rows, row_bytes]: pull: written; push: read
  EarlierRows earlier;     // pull
  int32_t routes_per_row;  // pull of token rows: topk, row = route / topk; rows of routes: 1
  int32_t own_rank;        // its rows do not cross a link and are not paced
  // Push: rows of the own rank are not moved; whoever computes them puts them there. Their tiles
  // are awaited and signalled as ever, so that the signal says that they are there; scalars move.
  bool skips_own_rank;
  uint64_t interval_ns;  // least time between two remote chunks of one warp; 0: not paced
  // The same while the block's pull warp moves rows (RowMover's `pulling`); 0: as interval_ns.
  uint64_t interval_beside_pulls_ns;
};

// One fp32 for each route of a rank, on every rank, mapped into this rank's address space.
struct PeerScalars {
  float* of_rank[kMaxExchangeRanks];  // [T * topk of that rank]
};

// Scalars that come in with rows.
struct ScalarPull {
  PeerScalars peers;  // read
  float* local;       // [ring rows]: written
};

// Scalars that go out with rows: sums of fixed order.
struct ScalarPush {
  PeerScalars peers;   // written
  const float* parts;  // [ring rows, num_parts]
  int32_t num_parts;
};

// The meetings of a pass.
enum class Meeting : int32_t {
  kEntry,
  kExit,
  // Before the entry of passes for which a rank prepares what some other rank may wish.
  kStart,
  // No meeting: raised before kStart by a rank that has a wish.
  kWish,
};
inline constexpr int kNumMeetings = 4;

// Flags through which the ranks meet. flags of rank r lie in r's memory, are written by its peers
// with the number of the pass and only grow. Zero before the first pass.
//
// That number, the epoch, is the caller's to count: 1, 2, ..., one more with every pass that met,
// the same on every rank. Host code may pass it as a parameter; a kernel that is replayed from a
// CUDA graph keeps it in device memory, and its last block increments it.
//
// A rank whose grid is aborted raises no further flag, neither of this pass nor of a later one: a
// peer that sees the exit would take rows for delivered that never left.
struct RankMeeting {
  uint64_t* flags_of_rank[kMaxExchangeRanks];  // [kNumMeetings, num_ranks]
  int32_t rank;
  int32_t num_ranks;

  // The flag that `from` raises in the memory of `in`.
  MOK_HOST_DEVICE uint64_t* Flag(int in, Meeting meeting, int from) const {
    return flags_of_rank[in] + static_cast<int>(meeting) * num_ranks + from;
  }
  static constexpr size_t FlagBytes(int num_ranks) {
    return sizeof(uint64_t) * kNumMeetings * num_ranks;
  }
};

// Mistakes that tests plant; the emulator or the comparison of results has to notice each.
enum class ExchangeBug : int32_t {
  kNone,
  kSkipTileWait,         // rows move before their counters allow
  kNoFenceAfterWait,     // bulk loads of acquired rows without a proxy fence
  kSignalBeforeWritten,  // a tile is signalled when its staging has been read, not written out
  kRelaxedSignal,
  kSignalWithoutSync,  // lane 0 signals while other lanes still move rows and scalars
  kNoReadWait,         // the staging is loaded while the last store still reads it
  kNoFullWait,         // and stored before the load has landed
  kChunkPastRow,       // the last chunk of a row is not cut
  kCopiesTooEarly,     // copies a row that may not have come in
  kNoFenceBeforeCopy,  // ... without a proxy fence
  kTokenAsRoute,       // rows of tokens are addressed as rows of routes
  kNoFlushAtEnd,       // the last tile is never signalled
  kMovesPadding,       // a tile's rows contain padding
  kMovesOwnRows,       // also the rows of the own rank that are to be skipped
  kStaysPulling,       // a warp that has pulled all its rows still shows that it moves some
  kFlagOfGpuScope,     // meetings
  kWaitOfGpuScope,
  kNoEntryWait,
  kNoExitWait,
  kFlagOfOtherMeeting,
  kCount
};

}  // namespace mok
