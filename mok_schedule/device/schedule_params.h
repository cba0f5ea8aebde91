// Parameters of the schedule kernel, and the memory it works in.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mok_core/bits.h"
#include "mok_core/device/wait_record.h"
#include "mok_core/status.h"
#include "mok_schedule/device/device_schedule.h"
#include "mok_schedule/device/schedule_error.h"
#include "mok_schedule/device/schedule_exchange.h"

namespace mok {

// Limits of the kernel's shared memory.
inline constexpr int kMaxScheduleExperts = 2048;  // local ones
inline constexpr int kMaxScheduleRanks = 256;

// In device memory, one per workspace, zero before the first launch. Only the epoch lives on from
// one batch to the next, so that a captured graph can be replayed.
struct ScheduleState {
  uint64_t epoch;            // batches that have been built
  uint64_t staged_blocks;    // blocks that have staged their part of the rank's ids
  uint64_t counted_blocks;   // blocks whose counts are complete
  uint64_t finished_blocks;  // blocks that are done with the batch
};

// The first invalid id that a block has seen.
struct InvalidId {
  int64_t route;  // kNoRoute: none
  int64_t id;
};

// Scratch in device memory, one per workspace; need not be initialised.
struct ScheduleScratch {
  InvalidId* invalid;     // [grid blocks] block -> the block that announces the batch
  int32_t* counts;        // [placing blocks, num_local_experts] rows: block -> all blocks
  int16_t* local_expert;  // [positions, topk] -1: no local expert. Counting -> placing, same warp
};

// Which part of the work a launch does.
enum class ScheduleSteps : int32_t {
  kAll,
  // For several ranks on one device, whose kernels run one after the other: first every rank
  // stages, then every rank builds.
  kStage,
  kBuild,
  // None of it: this rank's host has raised what its last refused batch was refused for. Needs
  // nothing but `refusals`.
  kResume,
};

struct ScheduleParams {
  struct Tokens {
    const void* expert_ids;  // [num_tokens, topk] int32 or int64, contiguous
    int64_t num_tokens;      // T of this rank, at most the layout's max_tokens
    int32_t id_bytes;        // 4 or 8
  } tokens;
  struct Layer {
    int32_t rank;
    int32_t ep_size;
    int32_t topk;
    int32_t num_experts;   // E
    int32_t first_expert;  // of this rank
    // H, I and Is, as far as the caller knows them: only compared, with the other ranks'.
    int32_t hidden = 0;
    int32_t intermediate = 0;
    int32_t shared_intermediate = 0;
    // Not kOk: this rank cannot take part in the batch, as its host has raised. Its tokens and
    // experts do not count, the batch is refused, and the other ranks record it.
    StatusCode failure = StatusCode::kOk;
  } layer;
  struct Exchange {
    std::byte* const* regions;  // [ep_size] in device memory: every rank's region
    ScheduleExchangeLayout layout;
  } exchange;
  DeviceSchedule schedule;  // kernel -> passes
  ScheduleScratch scratch;
  ScheduleState* state;
  RefusalState* refusals;      // schedule kernels and passes of this rank
  ScheduleErrorRecord* error;  // mapped host memory: kernel -> host
  DeviceWaitParams wait;
  ScheduleSteps steps;
};

// Where the scratch lies in one allocation, and the largest grid it serves.
class ScheduleScratchLayout {
 public:
  ScheduleScratchLayout(int64_t ep_size, int64_t max_tokens, int64_t topk,
                        int64_t num_local_experts, int64_t grid_blocks)
      : counts_(
            RoundUp<int64_t>(grid_blocks * static_cast<int64_t>(sizeof(InvalidId)), kAlignment)),
        local_expert_(counts_ + RoundUp<int64_t>(grid_blocks * num_local_experts *
                                                     static_cast<int64_t>(sizeof(int32_t)),
                                                 kAlignment)) {
    const int64_t positions = int64_t{1} << CeilLog2(static_cast<uint64_t>(ep_size * max_tokens));
    bytes_ = local_expert_ + positions * topk * static_cast<int64_t>(sizeof(int16_t));
  }

  int64_t bytes() const { return bytes_; }

  // `base`: bytes() of device memory, 128-byte aligned.
  ScheduleScratch At(void* base) const {
    std::byte* begin = static_cast<std::byte*>(base);
    return {reinterpret_cast<InvalidId*>(begin), reinterpret_cast<int32_t*>(begin + counts_),
            reinterpret_cast<int16_t*>(begin + local_expert_)};
  }

 private:
  static constexpr int64_t kAlignment = 128;

  int64_t counts_;
  int64_t local_expert_;
  int64_t bytes_;
};

}  // namespace mok
