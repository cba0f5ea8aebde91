// Schedule: the routing of one batch as this rank sees it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "mok_core/status.h"
#include "mok_megakernel/engine_config.h"
#include "mok_megakernel/mok.h"
#include "mok_megakernel/workspace.h"
#include "mok_schedule/ring_plan.h"
#include "mok_schedule/routing_table.h"

namespace mok {

struct Schedule {
  // Hash of all ranks' routes and numbers of experts: the same on all ranks, and enough to tell
  // that they pass the same schedule. It names no workspace, so a schedule outlives the one that
  // built it, and building it again gives the same bits.
  uint64_t fingerprint = 0;
  int64_t num_tokens = 0;  // T
  int64_t num_tokens_total = 0;
  int num_experts = 0;              // E
  int first_expert = 0;             // global id of local expert 0
  std::vector<int32_t> expert_ids;  // [T, K] this rank's own routes
  RoutingTable table;
  int64_t minibatch_rows = 0;  // as configured; 0: chosen by each pass
  int64_t ring_rows = 0;       // M row blocks of the ring, in rows; 0 when no route can lead here

  // [T, K] table row of each route of a single rank, whose routes all lead to itself; -1: no route.
  // Empty when there are several ranks. Follows from the table.
  std::vector<int32_t> row_of_route;

  void FillRowOfRoute();
  // The ring plan of a pass with `minibatch_rows` > 0 rows a minibatch.
  RingPlan Ring(int64_t pass_minibatch_rows) const;
};

// Collective, under workspace.lock(): the whole of mok_schedule_build.
StatusOr<std::unique_ptr<Schedule>> BuildSchedule(Workspace& workspace,
                                                  const MokEngineConfig* config,
                                                  const MokScheduleArgs* args);

}  // namespace mok
