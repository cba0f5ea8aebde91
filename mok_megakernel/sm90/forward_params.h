// Parameters of the Hopper forward kernel, shared by host and device code. Letters as in mok.h: T
// tokens of this rank, H hidden, I intermediate, Is that of the shared expert, E local experts, K
// top-k; "ring" is the number of ring rows. All pointers are device memory of this rank unless they
// say otherwise; matrices are bf16 and contiguous.
#pragma once

#include <cstdint>

#include "mok_comm/sm90/exchange_params.h"
#include "mok_core/device/ticket_counter.h"
#include "mok_core/device/types.h"
#include "mok_core/device/wait_record.h"
#include "mok_core/dtype.h"
#include "mok_schedule/device/device_schedule.h"
#include "mok_schedule/program_shape.h"

namespace mok {

// Which tasks a launch runs.
enum class ForwardMode : int32_t {
  // All of them: ranks run at the same time and meet inside the kernel.
  kWhole,
  // For ranks that share one GPU, whose kernels run one after the other: first this for every rank,
  // then kReduceOnly for every rank. Stream order stands in for the meetings.
  kExchangeAndCompute,
  kReduceOnly,  // TokenReduce
};

// State that outlives a launch. Zero before the first; every launch leaves it ready for the next,
// so that a captured graph can be replayed.
struct ForwardState {
  uint64_t epoch;            // passes that have met their peers
  uint64_t finished_blocks;  // of the running launch
  TicketCounter ticket;      // compute tasks: schedulers -> schedulers
};

struct ForwardParams {
  struct Shape {
    ProgramShape program;  // complete but for ring.num_row_blocks, which the schedule holds
    int32_t hidden;
    int32_t intermediate;
    int32_t shared_intermediate;  // 0: no shared expert
    int32_t topk;
    int64_t num_tokens;  // T
    float swiglu_limit;  // > 0, +infinity: plain
    ForwardMode mode;
    int32_t num_comm_sms;  // blocks that only exchange; 0: a warp of every block
  } shape;

  struct Tokens {
    TensorMap x;                // [T, H] caller -> SharedGateUp
    const float* topk_weight;   // [T, K] caller -> TokenReduce
    const void* expert_ids;     // [T, K] of id_bytes each: caller -> TokenReduce; -1: no route
    const float* shared_scale;  // [T] caller -> TokenReduce; has_shared_scale: else not read
    const BFloat16* routes;     // [T * K, H] peers' Combine -> TokenReduce
    BFloat16* out;              // [T, H] TokenReduce -> caller
    int32_t id_bytes;           // 4 or 8
    bool has_shared_scale;
  } tokens;

  struct Weights {          // caller -> the GEMM of the same name
    TensorMap gate;         // [E, I, H]
    TensorMap up;           // [E, I, H]
    TensorMap down;         // [E, H, I]
    TensorMap shared_gate;  // [1, Is, H]
    TensorMap shared_up;    // [1, Is, H]
    TensorMap shared_down;  // [1, H, Is]
  } weights;

  struct Ring {
    TensorMap x;           // [ring, H] Dispatch -> GateUp
    TensorMap activation;  // [ring, I] GateUp -> Down
    BFloat16* gate;        // [ring, I] GateUp -> backward
    BFloat16* up;          // [ring, I] GateUp -> backward
    BFloat16* h;           // [ring, I] what `activation` maps
    BFloat16* y;           // [ring, H] Down -> Combine
  } ring;

  struct Shared {
    TensorMap activation;  // [T, Is] SharedGateUp -> SharedDown
    BFloat16* gate;        // [T, Is] SharedGateUp -> backward
    BFloat16* up;          // [T, Is] SharedGateUp -> backward
    BFloat16* h;           // [T, Is] what `activation` maps
    BFloat16* y;           // [T, H] SharedDown -> TokenReduce
  } shared;

  struct Exchange {
    RowExchange dispatch;  // every rank's x -> ring.x
    RowExchange combine;   // ring.y -> every rank's routes
    RankMeeting meeting;
    uint32_t chunk_bytes;            // of the staging of a co-resident warp
    uint32_t dedicated_chunk_bytes;  // of a warp of a block that only exchanges
  } exchange;

  DeviceSchedule schedule;  // schedule kernel -> scheduler and exchange warps

  struct Signals {
    uint64_t* counters;  // [MaxForwardCounters] of the task program, zero between launches
    ForwardState* state;
    DeviceWaitParams wait;          // for counters of this GPU
    DeviceWaitParams meeting_wait;  // less patient, so that the record names the missing rank
  } signals;
};

// Who waits, in a DeviceWaitRecord. kMeeting: a warp in the entry or exit barrier; `task` of the
// record is then the missing rank.
enum class ForwardRole : int32_t { kConsumer, kProducer, kScheduler, kPull, kPush, kMeeting };
const char* ForwardRoleName(int32_t role);

// Mistakes that tests plant; the emulator or the comparison of results has to notice each.
enum class ForwardBug : int32_t {
  kNone,
  kSkipDependencies,      // the scheduler waits for nothing
  kSkipLastDependency,    // ... but for all waits except the last
  kNoProxyFence,          // neither who stores a tile nor who loads it
  kSignalBeforeEpilogue,  // a tile is signalled when only the first warps have stored it
  kRelaxedSignal,
  kReduceBeforeExit,  // TokenReduce does not wait
  kRingOverwrite,     // Dispatch does not wait for the readers of the slot
  kCombineTooEarly,   // Combine does not wait for Down
  kExitBeforeSent,    // the exit does not wait for this rank's own pushes
  kNoEntrySignal,
  kSignalOfOneWarpgroup,  // a tile is signalled when the first warpgroup has stored it
  kTaskReleasedBeforeRead,
  kNoEndOfWorkOnAbort,  // an aborted scheduler lets its block wait for ever
  kCountersKept,        // the next launch starts from the last one's counters
  kEpochKept,
  kNoTicketReset,
  kWrongSharedRows,  // the shared expert writes padding tokens
  kCount
};

}  // namespace mok
