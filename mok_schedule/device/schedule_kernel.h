// The schedule kernel: routing table and piece tables of a batch, built on the GPU from the expert
// ids of all ranks, bit for bit what BuildRoutingTable and BuildPieceTables build on the host. One
// launch, no host; no float, and no atomic whose order matters.
//
//   stage     ids into symmetric memory; the block that ends last raises this rank's flag at every
//             other rank
//   wait      for the flags of all ranks: the only wait for others, bounded
//   count     rows per expert of each warp's tokens, in bit-reversed token order
//   wait      for all blocks' counts
//   place     rows; one more block writes the other tables
#pragma once

#include "mok_core/device/device.h"
#include "mok_core/device/wait.h"
#include "mok_schedule/device/place_routes.h"
#include "mok_schedule/device/schedule_params.h"
#include "mok_schedule/device/schedule_storage.h"
#include "mok_schedule/device/stage_tokens.h"
#include "mok_schedule/device/write_tables.h"

namespace mok {

template <int kBug, class Storage>
MOK_DEVICE void BuildSchedule(const ScheduleParams& p, Storage& s, DeviceWait& wait) {
  if (!WaitForRanks<kBug>(p, s, wait)) return;
  const int64_t disagreement = ReadHeaders<kBug>(p, s);
  if (Thread() == 0) s.is_refused = disagreement == kNoRoute ? 0 : 1;
  if (!IsTableBlock()) CountRoutes<kBug>(p, s);
  if (!WaitForCounts<kBug>(p, s, wait)) return;
  LayOutExperts(p, s);
  if (IsTableBlock()) {
    WriteExperts(p, s);
    WritePieces(p, s);
    RecordErrors<kBug>(p, s, disagreement);
  } else {
    PlaceRoutes<kBug>(p, s);
  }
}

// Grid: placing blocks and one block for the tables, at least 2; all of them have to become
// resident.
template <int kThreads, int kBug>
MOK_KERNEL(kThreads, 1)
ScheduleKernel(MOK_GRID_CONSTANT(ScheduleParams) p) {
  using Storage = ScheduleStorage<kThreads>;
  MOK_SHARED_STORAGE(Storage, s);
  DeviceWait wait(p.wait, 0);
  if (Thread() == 0) s.epoch = LoadRelaxedGpu(&p.state->epoch) + 1;
  SyncBlock();
  if (p.steps != ScheduleSteps::kBuild) StageTokens<kBug>(p, s);
  if (p.steps == ScheduleSteps::kStage) return;
  BuildSchedule<kBug>(p, s, wait);
  FinishBatch<kBug>(p, s, wait);
}

}  // namespace mok
