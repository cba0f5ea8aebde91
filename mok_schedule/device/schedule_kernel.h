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
//
// A batch that is refused goes the same way without tokens; one that follows before the host has
// heard of it does so too, and neither stages nor waits for ranks (RefusalState).
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
MOK_DEVICE void BuildSchedule(const ScheduleParams& p, Storage& s, DeviceWait& wait,
                              bool takes_part) {
  BatchError error = BatchError::None();
  if (takes_part) {
    if (!WaitForRanks<kBug>(p, s, wait)) return;
    error = ReadHeaders<kBug>(p, s);
  } else {
    ClearTokens(p, s);
  }
  if (Thread() == 0) s.is_refused = takes_part && error.is_none() ? 0 : 1;
  if (!IsTableBlock()) CountRoutes<kBug>(p, s);
  if (!WaitForCounts<kBug>(p, s, wait)) return;
  LayOutExperts(p, s);
  if (IsTableBlock()) {
    WriteExperts(p, s);
    WritePieces(p, s);
    if (!error.is_none()) RecordError<kBug>(p, s, error);
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
  if (p.steps == ScheduleSteps::kResume) return Resume<kBug>(p);
  if (Thread() == 0) {
    s.epoch = LoadRelaxedGpu(&p.state->epoch) + 1;
    s.generation = LoadRelaxedGpu(&p.refusals->generation);
    s.is_refused = 0;
  }
  SyncBlock();
  const bool takes_part = !IsUnheard(s.generation) || kBug == kScheduleUnheardTakesPart;
  if (p.steps != ScheduleSteps::kBuild && takes_part) StageTokens<kBug>(p, s);
  if (p.steps == ScheduleSteps::kStage) return;
  BuildSchedule<kBug>(p, s, wait, takes_part);
  FinishBatch<kBug>(p, s, wait, takes_part);
}

}  // namespace mok
