// A kernel that only exchanges, for tests: each rank writes its x, and every row of the table is
// pulled into a small ring and pushed back to its route on the rank it came from.
#pragma once

#include <cstddef>

#include "mok_comm/sm90/exchange_params.h"
#include "mok_core/device/wait_record.h"

namespace mok::testing {

struct ExchangeTestParams {
  struct Tiles {
    int32_t num_tiles;      // of the table
    int32_t rows_per_tile;  // the last may have fewer
    int32_t num_rows;
    int32_t ring_tiles;  // tile t lives in ring slot t % ring_tiles
  } tiles;
  RowExchange pull;         // peers' x -> ring
  RowExchange push;         // ring -> peers' returned rows
  ScalarPull pull_scalars;  // peers' scalars -> parts of the rows in the ring
  ScalarPush push_scalars;  // sums of parts -> peers' returned scalars
  RankMeeting meeting;
  uint64_t* counters;      // [ExchangeTestCounters(ring_tiles)], zero when a pass starts
  uint64_t epoch;          // of this launch
  const uint32_t* source;  // [x_words]: host -> x
  uint32_t* x;             // [x_words] this rank's x -> peers' pulls
  int32_t x_words;
  const uint32_t* returned;  // [words] this rank's returned rows: peers' pushes -> copy
  uint32_t* copy;            // [words] what was there after the exit
  int32_t words;
  float* scalars;           // [num_routes] this rank's -> peers' pulls
  float* returned_scalars;  // [num_routes] peers' pushes -> copied_scalars
  float* copied_scalars;
  int32_t num_routes;
  uint32_t chunk_bytes;
  DeviceWaitParams wait;          // for counters of this GPU
  DeviceWaitParams meeting_wait;  // less patient, so that the record names the missing rank
};

// What a rank sends for its route, and what comes back.
MOK_HOST_DEVICE constexpr float ScalarOfRoute(int32_t route) { return 0.25f * (route + 1); }

// Counters: entry passed, tiles pushed, then tiles pulled into and pushed out of each slot.
inline constexpr int32_t kEntered = 0, kTotal = 1, kSlotCounters = 2;
constexpr int32_t ExchangeTestCounters(int32_t ring_tiles) {
  return kSlotCounters + 2 * ring_tiles;
}

inline constexpr int kExchangeTestThreads = 64;  // warp 0 pulls, warp 1 pushes
inline constexpr uint32_t kExchangeTestChunkBytes = 512;

// Kernel address; bug: ExchangeBug.
const void* ExchangeTestKernel(int bug);
size_t ExchangeTestSharedBytes();

}  // namespace mok::testing
