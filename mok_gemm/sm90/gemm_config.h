// Sizes of the Hopper GEMM worker. Host and device code read the same constants.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mok {

// In which order the rows of a B tile (output columns) lie in shared memory.
enum class ColumnOrder : int32_t {
  // As in global memory. A thread's accumulators then hold pairs of adjacent columns, and the
  // epilogue exchanges words inside quads of lanes before it stores 16 bytes. Any width.
  kNatural,
  // Shared-memory row 32 g + 8 j + 2 q + b holds matrix row 32 g + 8 q + 2 j + b (j, q < 4; b < 2):
  // the four word pairs that a thread accumulates per 32 columns are then 8 adjacent columns, and
  // no exchange is needed. Widths (I for gate and up, H for down) that are multiples of 32.
  kPermuted,
};

// Mistakes that tests plant (Config::kBug); the emulator or the comparison has to notice each.
enum class GemmBug : int {
  kNone,
  kSkipFullWait,
  kSkipEmptyWait,
  kReleaseTooEarly,  // a stage is freed while its multiply may still read it
  kNoReleaseOfLastStage,
  kIdleWarpgroupSkips,       // the second warpgroup of a short tile does not free stages
  kShortTileBytes,           // announces the bytes of the full tile for a short one
  kNarrowTileBytes,          // announces both halves of B when only the first is loaded
  kNarrowTileMultipliesAll,  // multiplies both halves when only the first is loaded
  kNoWgmmaFence,
  kEpilogueBeforeWait,  // accumulators are read while the last multiplies are in flight
  kWrongStageDescriptor,
  kWrongWarpgroupRows,
  kSecondHalfFromFirst,  // the up half of a GateUp tile comes from the gate weights
  kStoresPaddingRows,
  kStoresTailColumns,
  kNoQuadTranspose,
  kWrongColumnOrder,  // tile loaded in natural order, stored as if permuted
  kTaskReleasedBeforeRead,
  kQueueCountTooHigh,
  kEmptyCountTooHigh,
  kNoInitFence,
  // Of outputs that leave through a stage (held_stage.h).
  kFillsBeforeMultiply,     // while the other warpgroup still multiplies from the stage
  kNoFenceBeforeHandOver,   // generic stores, then the tensor store's reads
  kNoSyncBeforeHandOver,    // other lanes have not written their part
  kStoresBeforeFilled,      // the producer does not wait for the consumers
  kReloadsBeforeRead,       // the next load does not wait until the stores have read the stage
  kLeavesStoresBehind,      // the producer ends without the last tile's stores
  kPartialRowsStoredWhole,  // a warpgroup's, of which some belong to another expert
  kCount
};

// Mistakes in what only the backward does (Config::kBackwardBug).
enum class BackwardBug : int {
  kNone,
  kPaddingKept,           // rows of K behind the valid ones are multiplied
  kOnlyPaddingOfA,        // those of B are not cleared
  kClearsValidRow,        // one row too many
  kNoFenceAfterClearing,  // generic stores, then the multiply's reads
  kNoBarrierAfterClearing,
  kOneBarrierForAllTiles,     // tiles of one warpgroup use the barrier of two
  kMnStepOfKMajor,            // 32 bytes per step of K in an MN-major operand
  kSecondRangeFromFirst,      // InputGrad: dg Wg twice
  kIdleSkipsProductsOnly,     // the second warpgroup of a short DownGrad tile keeps g and u
  kActivationBytes,           // announces both warpgroups' g and u for a short tile
  kActivationColumn,          // g and u of the first 64 columns everywhere
  kReadsActivationsTooEarly,  // without waiting for them
  kNoSyncBeforeCopy,          // lanes read what others have not stored yet
  kNoFenceBeforeRelease,      // generic stores, then the next tensor load into the stage
  kReleasesBeforeCopy,
  kPartialOfOneLane,  // the router gradient lacks the columns of other lanes
  kUnweightedHidden,
  kStoresPaddingRows,
  kStoresTailColumns,
  kNoQuadTranspose,
  kCarryIgnored,
  kCarryStoredToOutput,
  kAddsNothing,            // accumulate overwrites
  kOverwritesWithoutRows,  // zeros in an accumulated output
  kCount
};

// kTileN columns by 64 rows per consumer warpgroup. Production: <256, 4, 2, ...> (128 x 256 x 64,
// four stages of 48 KiB). Tests shrink kTileN to 64 and use fewer stages.
template <int kTileNValue, int kStagesValue, int kConsumerWarpgroupsValue, ColumnOrder kOrderValue>
struct Sm90GemmConfig {
  static constexpr int kTileN = kTileNValue;
  static constexpr int kHalfN = kTileN / 2;  // GateUp: columns of g and of u
  static constexpr int kTileK = 64;          // one 128-byte swizzle span of bf16
  static constexpr int kStages = kStagesValue;
  static constexpr int kConsumerWarpgroups = kConsumerWarpgroupsValue;
  static constexpr int kWarpgroupM = 64;
  static constexpr int kTileM = kWarpgroupM * kConsumerWarpgroups;
  static constexpr ColumnOrder kOrder = kOrderValue;
  static constexpr GemmBug kBug = GemmBug::kNone;
  static constexpr BackwardBug kBackwardBug = BackwardBug::kNone;

  static constexpr int kAccumulators = kTileN / 2;  // fp32 registers per consumer thread
  static constexpr int kConsumerThreads = 128 * kConsumerWarpgroups;
  static constexpr int kConsumerWarps = 4 * kConsumerWarpgroups;

  // One tensor load each: the 64 rows of A of a warpgroup, half of the columns of B.
  static constexpr uint32_t kABoxBytes = kWarpgroupM * kTileK * 2;
  static constexpr uint32_t kBBoxBytes = kHalfN * kTileK * 2;
  static constexpr uint32_t kABytes = kABoxBytes * kConsumerWarpgroups;
  static constexpr uint32_t kBBytes = 2 * kBBoxBytes;

  // What of an output tile leaves through its last stage (held_stage.h), in boxes of kTileK columns
  // by the rows of a warpgroup: the first one through A, others, as many as fit, through B.
  static constexpr int kHeldInB = kBBytes / kABytes < kTileN / kTileK - 1
                                      ? static_cast<int>(kBBytes / kABytes)
                                      : kTileN / kTileK - 1;
  static constexpr int kHeldBoxes = 1 + kHeldInB;
  static constexpr int kHeldColumns = kHeldBoxes * kTileK;

  static_assert(kConsumerWarpgroups == 1 || kConsumerWarpgroups == 2);
  static_assert(kTileN == 64 || kTileN == 128 || kTileN == 192 || kTileN == 256);
  static_assert(kHalfN % 32 == 0, "a half tile is made of groups of 32 columns");
  static_assert(kStages >= 2, "a stage is freed when the next one has been issued");
};

// The named barriers that the worker uses, all between consumers: each pair is for tiles on which
// one and two warpgroups work. 0 is SyncBlock's; 5 to 15 are left to the kernel.
inline constexpr int kShortHeldBarrier = 1, kHeldBarrier = 2;        // held_stage.h
inline constexpr int kShortPaddingBarrier = 3, kPaddingBarrier = 4;  // backward_worker.h

// 128 x 256 x 64 with four stages: 192 KiB of the 227 KiB that a block may have.
template <ColumnOrder kOrder>
using DefaultSm90GemmConfig = Sm90GemmConfig<256, 4, 2, kOrder>;

// Registers per thread that the roles of a 384-thread block set (168 at launch): for the warpgroup
// of producer, scheduler and exchange warps, and for the two consumer warpgroups. Consumers do with
// 200, and every register more keeps spills of the layer's schedulers and exchange warps out of
// memory: with 104 they spill 80 bytes (forward) and 348 (backward), with 72 it was 622 and 1,082.
inline constexpr int kSm90LaunchRegisters = 168;
inline constexpr int kSm90ProducerRegisters = 104;
inline constexpr int kSm90ConsumerRegisters = 200;
static_assert(kSm90ProducerRegisters + 2 * kSm90ConsumerRegisters <= 3 * kSm90LaunchRegisters);

}  // namespace mok
