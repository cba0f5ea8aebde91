#include "mok_megakernel/schedule.h"

#include <algorithm>
#include <utility>

#include "mok_core/argument_checks.h"
#include "mok_core/bits.h"
#include "mok_megakernel/api_error.h"
#include "mok_megakernel/fingerprint.h"

namespace mok {
namespace {

Status CheckArgs(const Workspace& workspace, const MokScheduleArgs* args) {
  MOK_RETURN_IF_ERROR(CheckPointer("args", args));
  MOK_RETURN_IF_ERROR(
      CheckStructSize("MokScheduleArgs", args->struct_size, sizeof(MokScheduleArgs)));
  if (args->num_tokens < 0 || args->num_tokens > workspace.shape().max_tokens) {
    return InvalidArgumentError(
        "num_tokens: expected 0 to max_tokens = ", workspace.shape().max_tokens,
        " of the workspace, got ", args->num_tokens);
  }
  MOK_RETURN_IF_ERROR(
      CheckRange("num_local_experts", args->num_local_experts, 0, MOK_MAX_LOCAL_EXPERTS));
  MOK_RETURN_IF_ERROR(CheckRange("num_experts", args->num_experts, 0, INT32_MAX));
  return args->num_tokens > 0 ? CheckAligned("topk_idx", args->topk_idx, sizeof(int64_t))
                              : OkStatus();
}

// Notes the extreme ids, so that every rank can check every rank's ids from the records alone, also
// those that would not fit the published int32 routes.
void RecordExtremes(const MokScheduleArgs& args, int topk, HandshakeRecord* record) {
  const int64_t num_ids = args.num_tokens * topk;
  if (num_ids == 0) return;
  const auto [lowest, highest] = std::minmax_element(args.topk_idx, args.topk_idx + num_ids);
  const auto note = [&](const int64_t* id, int64_t* slot) {
    const int64_t index = id - args.topk_idx;
    slot[0] = *id;
    slot[1] = index / topk;
    slot[2] = index % topk;
  };
  note(lowest, record->lowest_id);
  note(highest, record->highest_id);
}

bool IdsFitInt32(const HandshakeRecord& record) {
  return record.lowest_id[0] >= -1 && record.highest_id[0] <= INT32_MAX;
}

static_assert(int64_t{MOK_MAX_RANKS} * MOK_MAX_LOCAL_EXPERTS <= INT32_MAX);

StatusOr<ExpertPartition> PartitionOf(const Workspace& workspace, const Handshake& handshake) {
  ExpertPartition partition;
  int64_t num_experts = 0;
  partition.begin.push_back(0);
  for (int rank = 0; rank < workspace.shape().ep_size; ++rank) {
    num_experts += handshake.RecordOf(rank).num_local_experts;
    partition.begin.push_back(static_cast<int32_t>(num_experts));
  }
  if (num_experts == 0) {
    return InvalidArgumentError("num_local_experts: 0 on every rank, expected at least one expert");
  }
  return partition;
}

Status CheckIds(const Workspace& workspace, const Handshake& handshake, int num_experts) {
  for (int rank = 0; rank < workspace.shape().ep_size; ++rank) {
    const HandshakeRecord record = handshake.RecordOf(rank);
    const bool too_low = record.lowest_id[0] < -1;
    if (!too_low && record.highest_id[0] < num_experts) continue;
    const int64_t* id = too_low ? record.lowest_id : record.highest_id;
    return OutOfRangeError("topk_idx: rank ", rank, ", token ", id[1], ", k ", id[2],
                           ": expected an expert id in [-1, ", num_experts, "), got ", id[0]);
  }
  return OkStatus();
}

uint64_t FingerprintOf(const ExpertPartition& partition, const GatheredRoutes& gathered) {
  std::vector<int32_t> sizes = partition.begin;
  for (const int64_t num_tokens : gathered.num_tokens) {
    sizes.push_back(static_cast<int32_t>(num_tokens));
  }
  return Fingerprint(sizes) ^ (Fingerprint(gathered.expert_ids) << 1);
}

// Rows of the ring: what the configuration asks for, at most what any routing of these tokens could
// fill.
int64_t RingRows(const Schedule& schedule, const EngineConfig& config) {
  const RoutingTable& table = schedule.table;
  const int64_t capacity =
      RoutingTableCapacityRows(schedule.num_tokens_total, table.topk, table.num_local_experts);
  if (config.macrobatch_rows == -1) return capacity;
  if (config.macrobatch_rows > 0) {
    return std::min(RoundUp<int64_t>(config.macrobatch_rows, kRowBlock), capacity);
  }
  MacrobatchModel model;
  model.total_tokens = schedule.num_tokens_total;
  model.topk = table.topk;
  model.num_experts = schedule.num_experts;
  model.num_local_experts = table.num_local_experts;
  // Not rounded to minibatches: the ring needs no multiple, and the pass may choose their size.
  model.minibatch_rows = kRowBlock;
  return std::min(DefaultMacrobatchRows(model), capacity);
}

}  // namespace

void Schedule::FillRowOfRoute() {
  if (table.ep_size > 1) return;
  row_of_route.assign(expert_ids.size(), -1);
  for (size_t row = 0; row < table.source_route.size(); ++row) {
    const int32_t route = table.source_route[row];
    if (route >= 0) row_of_route[static_cast<size_t>(route)] = static_cast<int32_t>(row);
  }
}

RingPlan Schedule::Ring(int64_t pass_minibatch_rows) const {
  RingPlan ring;
  ring.num_row_blocks = table.num_row_blocks();
  ring.minibatch_blocks = CeilDiv<int64_t>(pass_minibatch_rows, kRowBlock);
  ring.macrobatch_blocks = std::max<int64_t>(1, ring_rows / kRowBlock);
  return ring;
}

StatusOr<std::unique_ptr<Schedule>> BuildSchedule(Workspace& workspace,
                                                  const MokEngineConfig* config,
                                                  const MokScheduleArgs* args) {
  const WorkspaceShape& shape = workspace.shape();
  const StatusOr<EngineConfig> resolved = ResolveConfig(config, shape.ep_size);
  const Status checked = resolved.ok() ? CheckArgs(workspace, args) : resolved.status();
  if (!checked.ok()) return workspace.MeetWithError(Operation::kSchedule, checked);

  HandshakeRecord record = workspace.NewRecord(Operation::kSchedule);
  record.num_local_experts = args->num_local_experts;
  record[AgreedField::kNumExperts] = args->num_experts;
  RecordExtremes(*args, shape.topk, &record);
  PublishedRoutes routes;
  if (IdsFitInt32(record)) routes = {args->topk_idx, args->num_tokens};
  MOK_RETURN_IF_ERROR(workspace.Meet(record, routes));

  // From here on every rank holds the same records and reaches the same errors; no rank waits for
  // another one any more.
  const Handshake& handshake = workspace.handshake();
  MOK_ASSIGN_OR_RETURN(const ExpertPartition partition, PartitionOf(workspace, handshake));
  if (args->num_experts != 0 && args->num_experts != partition.num_experts()) {
    return InvalidArgumentError("num_experts: expected ", args->num_experts,
                                ", the ranks' num_local_experts add up to ",
                                partition.num_experts());
  }
  MOK_RETURN_IF_ERROR(CheckIds(workspace, handshake, partition.num_experts()));
  MOK_ASSIGN_OR_RETURN(const GatheredRoutes gathered, handshake.GatherRoutes());
  std::vector<RankRoutes> routes_of_ranks;
  for (int rank = 0; rank < shape.ep_size; ++rank) {
    routes_of_ranks.push_back(
        {gathered.Rank(rank), gathered.num_tokens[static_cast<size_t>(rank)]});
  }
  auto schedule = std::make_unique<Schedule>();
  schedule->fingerprint = FingerprintOf(partition, gathered);
  schedule->num_tokens = args->num_tokens;
  schedule->num_tokens_total = gathered.first_token.back();
  schedule->num_experts = partition.num_experts();
  schedule->first_expert = partition.begin[static_cast<size_t>(shape.rank)];
  const int32_t* own_routes = gathered.Rank(shape.rank);
  schedule->expert_ids.assign(own_routes, own_routes + args->num_tokens * shape.topk);
  MOK_ASSIGN_OR_RETURN(schedule->table,
                       BuildRoutingTable(routes_of_ranks, partition, shape.rank, shape.topk));
  schedule->FillRowOfRoute();
  schedule->minibatch_rows = RoundUp<int64_t>(resolved.value().minibatch_rows, kRowBlock);
  schedule->ring_rows = RingRows(*schedule, resolved.value());
  return schedule;
}

}  // namespace mok
