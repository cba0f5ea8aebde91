// Two GPUs exchange rows, for tests: the skeleton of the layer's communication. Each rank writes x,
// meets its peer at an entry barrier, pulls the peer's rows into its ring with bulk copies, adds
// nothing, pushes each ring row back into the peer's buffer, and meets it at an exit barrier.
#pragma once

#include "mok_core/device/types.h"
#include "mok_core/device/wait_record.h"
#include "mok_core/emulator/tests/test_kernel.h"

namespace mok::testing::exchange {

constexpr int kRows = 8, kRowWords = 64;  // of 4 bytes
constexpr int kBlocks = 2;                // block 0 pulls, block 1 pushes and reduces

enum Bug {
  kCorrect,
  kEntryReleaseGpuScope,
  kEntryAcquireGpuScope,
  kEntryFenceGpuScope,
  kNoEntryWait,
  kNoProxyFenceAfterEntry,
  kRelaxedRingSignal,
  kSignalAfterReadWait,
  kNoProxyFenceAfterRing,
  kExitReleaseGpuScope,
  kExitAfterReadWait,
  kNoExitWait,
  kNonCoherentLoad,
  kPeerNotMapped,
  kPullOutOfBounds,
  kBugCount
};

// Everything of one rank that its peer may touch.
struct RankMemory {
  float* x;         // [kRows, kRowWords]: this rank -> pulled by the peer
  float* returned;  // [kRows, kRowWords]: pushed by the peer -> this rank
  uint64_t* entry;  // signalled by the peer: its x is in place
  uint64_t* exit;   // signalled by the peer: its pushes are complete
};

struct Params {
  RankMemory own, peer;
  float* ring;            // [kRows, kRowWords]: block 0 -> block 1
  uint64_t* ring_filled;  // rows of the ring, counted: block 0 -> block 1
  float* sums;            // [kRowWords]: sums of the returned rows
  DeviceWaitParams wait;
};

TestKernel ExchangeKernel(int bug);

}  // namespace mok::testing::exchange
