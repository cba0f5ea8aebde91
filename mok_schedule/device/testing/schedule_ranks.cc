#include "mok_schedule/device/testing/schedule_ranks.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "mok_core/device/runtime.h"
#include "mok_schedule/device/testing/schedule_test_kernels.h"
#include "mok_schedule/task_program.h"

namespace mok::testing {
namespace {

// What no correct value looks like: the kernel has to write all that it promises.
constexpr unsigned char kSpoiled = 0x5A;

void MustSucceed(const Status& status) { MOK_CHECK(status.ok()) << status; }

int64_t Uniform(std::mt19937_64& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

template <class T>
std::vector<T> FromDevice(const T* device, size_t count) {
  std::vector<T> values(count);
  if (count > 0) MustSucceed(runtime::CopyToHost(values.data(), device, count * sizeof(T)));
  return values;
}

// Names the first element that differs.
template <class T>
Status CompareArray(const char* name, const T* device, const std::vector<T>& expected) {
  const std::vector<T> actual = FromDevice(device, expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    if (actual[i] == expected[i]) continue;
    return InternalError(name, "[", i, "]: expected ", expected[i], ", got ", actual[i]);
  }
  return OkStatus();
}

}  // namespace

std::string ScheduleRanksConfig::Description() const {
  std::string text = StrCat("topk ", topk, ", id bytes ", id_bytes, ", grid ", grid_blocks,
                            ", macrobatch ", macrobatch_blocks, ", experts");
  for (const int32_t begin : partition.begin) text += StrCat(" ", begin);
  return text;
}

ScheduleRanks::ScheduleRanks(const ScheduleRanksConfig& config, int num_slots)
    : config_(config),
      ranks_(config.ep_size()),
      batches_(num_slots),
      invalid_(num_slots),
      refused_(num_slots) {
  for (int rank = 0; rank < config.ep_size(); ++rank) AllocateRank(rank, num_slots);
  std::vector<void*> regions;
  for (const Rank& rank : ranks_) regions.push_back(rank.region);
  for (Rank& rank : ranks_) {
    for (const Rank& peer : ranks_) {
      MustSucceed(runtime::EnablePeerAccess(rank.device, peer.device));
    }
    const size_t bytes = regions.size() * sizeof(void*);
    void* table = Allocate(rank.device, static_cast<int64_t>(bytes), "regions");
    MustSucceed(runtime::CopyToDevice(table, regions.data(), bytes));
    rank.params.exchange.regions = static_cast<std::byte* const*>(table);
  }
}

ScheduleRanks::~ScheduleRanks() {
  for (void* allocation : allocations_) MustSucceed(runtime::Free(allocation));
}

void* ScheduleRanks::Allocate(int device, int64_t bytes, const char* name) {
  StatusOr<void*> memory =
      runtime::AllocateDevice(device, static_cast<size_t>(std::max<int64_t>(bytes, 16)), name);
  MOK_CHECK(memory.ok()) << memory.status();
  allocations_.push_back(memory.value());
  return memory.value();
}

DeviceScheduleLayout ScheduleRanks::TableLayout(int rank) const {
  const int num_local_experts = config_.partition.num_local_experts(rank);
  const int64_t rows = RoutingTableCapacityRows(config_.ep_size() * config_.max_tokens,
                                                config_.topk, num_local_experts);
  return DeviceScheduleLayout({rows, num_local_experts, config_.macrobatch_blocks,
                               config_.ep_size(), config_.max_tokens, config_.topk});
}

void ScheduleRanks::AllocateRank(int index, int num_slots) {
  Rank& rank = ranks_[index];
  rank.device = config_.own_devices ? index : 0;
  const int num_local_experts = config_.partition.num_local_experts(index);
  const ScheduleExchangeLayout exchange(config_.ep_size(), config_.max_tokens, config_.topk);
  rank.region = Allocate(rank.device, exchange.bytes(), "exchange");
  MustSucceed(runtime::Fill(rank.region, 0, config_.ep_size() * sizeof(uint64_t)));

  ScheduleParams& params = rank.params;
  params.tokens.id_bytes = config_.id_bytes;
  params.layer = {index, config_.ep_size(), config_.topk, config_.partition.num_experts(),
                  config_.partition.begin[index]};
  params.exchange.layout = exchange;
  const ScheduleScratchLayout scratch(config_.ep_size(), config_.max_tokens, config_.topk,
                                      num_local_experts, config_.grid_blocks);
  params.scratch = scratch.At(Allocate(rank.device, scratch.bytes(), "scratch"));
  void* state = Allocate(rank.device, sizeof(ScheduleState), "state");
  MustSucceed(runtime::Fill(state, 0, sizeof(ScheduleState)));
  params.state = static_cast<ScheduleState*>(state);
  void* refusals = Allocate(rank.device, sizeof(RefusalState), "refusals");
  MustSucceed(runtime::Fill(refusals, 0, sizeof(RefusalState)));
  params.refusals = static_cast<RefusalState*>(refusals);
  void* abort = Allocate(rank.device, sizeof(uint32_t), "abort");
  MustSucceed(runtime::Fill(abort, 0, sizeof(uint32_t)));
  for (int i = 0; i < 2; ++i) {
    const size_t bytes = std::max(sizeof(ScheduleErrorRecord), sizeof(DeviceWaitRecord));
    StatusOr<void*> record = runtime::AllocateMappedHost(bytes, i == 0 ? "error" : "wait_record");
    MOK_CHECK(record.ok()) << record.status();
    allocations_.push_back(record.value());
    if (i == 0) {
      params.error = static_cast<ScheduleErrorRecord*>(record.value());
    } else {
      params.wait = {static_cast<DeviceWaitRecord*>(record.value()), static_cast<uint32_t*>(abort),
                     config_.timeout_ns, index};
    }
  }
  rank.slots.resize(num_slots);
  for (Slot& slot : rank.slots) {
    slot.ids = Allocate(rank.device, config_.max_tokens * config_.topk * config_.id_bytes, "ids");
    slot.memory = Allocate(rank.device, TableLayout(index).bytes(), "schedule");
    slot.schedule = TableLayout(index).At(slot.memory);
  }
}

void ScheduleRanks::SetBatch(const ScheduleBatch& batch, int slot_index) {
  batches_[slot_index] = batch;
  invalid_[slot_index] = HasInvalidIds(slot_index);
  for (int index = 0; index < config_.ep_size(); ++index) {
    Slot& slot = ranks_[index].slots[slot_index];
    const std::vector<int64_t>& ids = batch[index];
    slot.num_tokens = static_cast<int64_t>(ids.size()) / config_.topk;
    const std::vector<int32_t> narrow(ids.begin(), ids.end());
    const void* source = config_.id_bytes == 8 ? static_cast<const void*>(ids.data())
                                               : static_cast<const void*>(narrow.data());
    if (!ids.empty()) {
      MustSucceed(runtime::CopyToDevice(slot.ids, source, ids.size() * config_.id_bytes));
    }
    MustSucceed(runtime::Fill(slot.memory, kSpoiled, TableLayout(index).bytes()));
  }
}

void ScheduleRanks::LaunchSteps(int slot_index, int index, ScheduleSteps steps) {
  const Rank& rank = ranks_[index];
  const Slot& slot = rank.slots[slot_index];
  ScheduleParams params = rank.params;
  params.tokens.expert_ids = slot.ids;
  params.tokens.num_tokens = slot.num_tokens;
  params.schedule = slot.schedule;
  params.steps = steps;
  ScheduleLaunch launch;
  launch.grid_blocks = config_.grid_blocks;
  launch.device = rank.device;
  MustSucceed(LaunchSchedule(config_.kernel, params, launch));
}

void ScheduleRanks::LaunchRanks(int slot, const std::vector<int>& ranks) {
  if (config_.own_devices) {
    for (const int rank : ranks) LaunchSteps(slot, rank, ScheduleSteps::kAll);
    return;
  }
  for (const int rank : ranks) LaunchSteps(slot, rank, ScheduleSteps::kStage);
  for (const int rank : ranks) LaunchSteps(slot, rank, ScheduleSteps::kBuild);
}

void ScheduleRanks::Launch(int slot) {
  const bool is_invalid = invalid_[slot];
  refused_[slot] = is_invalid || is_unheard_;
  if (is_invalid && config_.ep_size() > 1) is_unheard_ = true;
  std::vector<int> all;
  for (int rank = 0; rank < config_.ep_size(); ++rank) all.push_back(rank);
  LaunchRanks(slot, all);
}

void ScheduleRanks::Resume(int rank) {
  is_unheard_ = false;
  LaunchSteps(0, rank, ScheduleSteps::kResume);
}

RefusalState ScheduleRanks::refusals(int rank) const {
  return FromDevice(ranks_[rank].params.refusals, 1)[0];
}

void ScheduleRanks::SetRefusals(int rank, const RefusalState& state) {
  MustSucceed(runtime::CopyToDevice(ranks_[rank].params.refusals, &state, sizeof(state)));
}

bool ScheduleRanks::HasInvalidIds(int slot) const {
  for (const std::vector<int64_t>& ids : batches_[slot]) {
    for (const int64_t id : ids) {
      if (id < -1 || id >= config_.partition.num_experts()) return true;
    }
  }
  return false;
}

StatusOr<RoutingTable> ScheduleRanks::ExpectedTable(int slot, int rank, bool is_refused) const {
  std::vector<std::vector<int32_t>> narrow;
  std::vector<RankRoutes> routes;
  for (const std::vector<int64_t>& ids : batches_[slot]) {
    narrow.emplace_back(ids.begin(), ids.end());
    const int64_t num_tokens = static_cast<int64_t>(ids.size()) / config_.topk;
    routes.push_back({narrow.back().data(), is_refused ? 0 : num_tokens});
  }
  return BuildRoutingTable(routes, config_.partition, rank, config_.topk);
}

Status ScheduleRanks::CompareTo(int slot, int rank, bool is_refused) const {
  MOK_ASSIGN_OR_RETURN(const RoutingTable expected, ExpectedTable(slot, rank, is_refused));
  Status status = CompareRank(rank, slot, expected, is_refused);
  if (status.ok()) status = CompareFirstRows(rank, slot, expected);
  if (status.ok()) status = ComparePieces(rank, slot, expected);
  return status.ok() ? status : InternalError("rank ", rank, ": ", status.message());
}

Status ScheduleRanks::CompareRefused(int slot, int rank) const {
  return CompareTo(slot, rank, true);
}

Status ScheduleRanks::Compare(int slot) const {
  for (int rank = 0; rank < config_.ep_size(); ++rank) {
    MOK_RETURN_IF_ERROR(CompareTo(slot, rank, refused_[slot]));
  }
  return OkStatus();
}

Status ScheduleRanks::CompareRank(int rank, int slot, const RoutingTable& expected,
                                  bool is_refused) const {
  const DeviceSchedule& actual = schedule(rank, slot);
  const DeviceScheduleResult result = FromDevice(actual.result, 1)[0];
  int64_t total_tokens = 0;
  for (const auto& ids : batches_[slot]) {
    if (!is_refused) total_tokens += static_cast<int64_t>(ids.size()) / config_.topk;
  }
  if (result.num_row_blocks != expected.num_row_blocks() || result.total_tokens != total_tokens) {
    return InternalError("expected ", expected.num_row_blocks(), " row blocks and ", total_tokens,
                         " tokens, got ", result.num_row_blocks, " and ", result.total_tokens);
  }
  if ((result.generation == DeviceScheduleResult::kRefused) != is_refused) {
    return InternalError(is_refused ? "not refused" : "refused");
  }
  MOK_RETURN_IF_ERROR(
      CompareArray("expert_block_begin", actual.expert_block_begin, expected.expert_block_begin));
  MOK_RETURN_IF_ERROR(CompareArray("expert_rows", actual.expert_rows, expected.expert_rows));
  MOK_RETURN_IF_ERROR(CompareArray("block_expert", actual.block_expert, expected.block_expert));
  MOK_RETURN_IF_ERROR(CompareArray("source_rank", actual.source_rank, expected.source_rank));
  return CompareArray("source_route", actual.source_route, expected.source_route);
}

Status ScheduleRanks::CompareFirstRows(int rank, int slot, const RoutingTable& expected) const {
  const FirstRows& actual = schedule(rank, slot).first_rows;
  if ((actual.of_token != nullptr) != (config_.ep_size() > 1 && config_.topk > 1)) {
    return InternalError("first_rows: ", actual.of_token != nullptr ? "there" : "missing");
  }
  if (actual.of_token == nullptr) return OkStatus();
  const auto rows = FromDevice(actual.of_token, config_.ep_size() * config_.max_tokens);
  std::vector<bool> seen(rows.size());
  for (int64_t row = 0; row < expected.num_rows(); ++row) {
    const int64_t source = expected.source_rank[row];
    if (source < 0) continue;
    const int64_t token = source * config_.max_tokens + expected.source_route[row] / config_.topk;
    if (!seen[token] && rows[token] != row) {
      return InternalError("first_rows[", token, "]: expected ", row, ", got ", rows[token]);
    }
    seen[token] = true;
  }
  return OkStatus();
}

Status ScheduleRanks::ComparePieces(int rank, int slot, const RoutingTable& expected) const {
  const RingPlan ring = {expected.num_row_blocks(), 1, config_.macrobatch_blocks};
  const int64_t macrobatches = ring.num_macrobatches();
  std::vector<int32_t> piece_begin(macrobatches + 2);
  std::vector<int32_t> piece_expert(expected.num_local_experts + macrobatches);
  std::vector<int32_t> carry_owner(macrobatches + 1);
  BuildPieceTables(ring, expected.view(),
                   {piece_begin.data(), piece_expert.data(), carry_owner.data()});
  piece_expert.resize(piece_begin.back());
  const PieceTables& actual = schedule(rank, slot).pieces;
  MOK_RETURN_IF_ERROR(CompareArray("piece_begin", actual.piece_begin, piece_begin));
  MOK_RETURN_IF_ERROR(CompareArray("piece_expert", actual.piece_expert, piece_expert));
  return CompareArray("carry_owner", actual.carry_owner, carry_owner);
}

ScheduleRanksConfig RandomScheduleConfig(int most_ranks, int64_t most_tokens,
                                         std::mt19937_64& random) {
  ScheduleRanksConfig config;
  const int ep_size = static_cast<int>(Uniform(random, 1, most_ranks));
  config.topk = static_cast<int>(Uniform(random, 1, 5));
  config.id_bytes = Uniform(random, 0, 1) == 0 ? 4 : 8;
  config.max_tokens = Uniform(random, 0, most_tokens);
  const int num_experts = static_cast<int>(Uniform(random, 1, 5) * Uniform(random, 1, 6));
  config.partition = EvenPartition(num_experts, ep_size);
  if (Uniform(random, 0, 1) == 0) {
    for (int rank = 1; rank < ep_size; ++rank) {
      config.partition.begin[rank] = static_cast<int32_t>(Uniform(random, 0, num_experts));
    }
    std::sort(config.partition.begin.begin(), config.partition.begin.end());
  }
  config.macrobatch_blocks = Uniform(random, 1, 4);
  config.grid_blocks = static_cast<int>(Uniform(random, 2, 5));
  return config;
}

ScheduleBatch RandomScheduleBatch(const ScheduleRanksConfig& config, bool with_invalid_ids,
                                  std::mt19937_64& random) {
  const int64_t num_experts = config.partition.num_experts();
  const int64_t favourite = Uniform(random, 0, num_experts - 1);
  const int64_t style = Uniform(random, 0, 3);
  ScheduleBatch batch(config.ep_size());
  for (std::vector<int64_t>& ids : batch) {
    const bool is_full = Uniform(random, 0, 1) == 0;
    const int64_t num_tokens = is_full ? config.max_tokens : Uniform(random, 0, config.max_tokens);
    for (int64_t i = 0; i < num_tokens * config.topk; ++i) {
      int64_t id = Uniform(random, -1, num_experts - 1);
      if (style == 1) id = favourite;
      if (style == 2) id = std::min(id, favourite);
      if (style == 3 && Uniform(random, 0, 1) == 0) id = -1;
      if (with_invalid_ids && Uniform(random, 0, 9) == 0) {
        const int64_t wrong[] = {-2, num_experts, INT32_MAX, INT32_MIN, (int64_t{1} << 32) + 1};
        id = wrong[Uniform(random, 0, config.id_bytes == 8 ? 4 : 3)];
      }
      ids.push_back(id);
    }
  }
  return batch;
}

namespace {

// A random shape over a schedule, as RandomProgram makes them.
ProgramShape RandomShape(const DeviceSchedule& schedule, std::mt19937_64& random) {
  ProgramShape shape;
  shape.pass = Uniform(random, 0, 1) == 0 ? Pass::kForward : Pass::kBackward;
  shape.ring.minibatch_blocks = Uniform(random, 1, 3);
  shape.ring.macrobatch_blocks = schedule.macrobatch_blocks;
  shape.intermediate_tiles = static_cast<int32_t>(Uniform(random, 1, 3));
  shape.down_grad_tiles = static_cast<int32_t>(Uniform(random, 1, 3));
  shape.hidden_tiles = static_cast<int32_t>(Uniform(random, 1, 3));
  shape.exchange_tiles = 1 << Uniform(random, 0, 3);
  shape.token_blocks = Uniform(random, 0, 3);
  shape.kept_macrobatches = static_cast<int32_t>(Uniform(random, 0, 1));
  return shape;
}

bool SameDependencies(const Dependencies& a, const Dependencies& b) {
  const auto same_wait = [](const Wait& x, const Wait& y) {
    return x.first_counter == y.first_counter && x.num_counters == y.num_counters &&
           x.target == y.target;
  };
  return std::equal(a.waits, a.waits + a.num_waits, b.waits, b.waits + b.num_waits, same_wait) &&
         std::equal(a.signals, a.signals + a.num_signals, b.signals, b.signals + b.num_signals);
}

}  // namespace

Status CompareDecoding(const ScheduleRanks& ranks, int rank, int slot, std::mt19937_64& random) {
  const DeviceSchedule& schedule = ranks.schedule(rank, slot);
  const int64_t num_row_blocks = FromDevice(schedule.result, 1)[0].num_row_blocks;
  const auto rows = FromDevice(schedule.expert_rows, schedule.num_local_experts);
  const auto begins = FromDevice(schedule.expert_block_begin, schedule.num_local_experts + 1);
  const auto experts = FromDevice(schedule.block_expert, num_row_blocks);
  const RoutingTableView table = {nullptr,     nullptr,        begins.data(),
                                  rows.data(), experts.data(), schedule.num_local_experts};
  DecodeParams params;
  params.schedule = schedule;
  params.shape = RandomShape(schedule, random);
  params.queue = static_cast<Queue>(Uniform(random, 0, kNumQueues - 1));
  ProgramShape shape = params.shape;
  shape.ring.num_row_blocks = num_row_blocks;
  MOK_ASSIGN_OR_RETURN(const TaskProgram program, TaskProgram::Create(shape, table));
  const int64_t num_tasks = program.NumTasks(params.queue);
  params.capacity = num_tasks;
  const size_t task_bytes = std::max<size_t>(num_tasks * sizeof(Task), 1);
  const size_t dependency_bytes = std::max<size_t>(num_tasks * sizeof(Dependencies), 1);
  MOK_ASSIGN_OR_RETURN(void* const count, runtime::AllocateDevice(0, sizeof(int64_t), "count"));
  MOK_ASSIGN_OR_RETURN(void* const tasks, runtime::AllocateDevice(0, task_bytes, "tasks"));
  MOK_ASSIGN_OR_RETURN(void* const dependencies,
                       runtime::AllocateDevice(0, dependency_bytes, "dependencies"));
  params.num_tasks = static_cast<int64_t*>(count);
  params.tasks = static_cast<Task*>(tasks);
  params.dependencies = static_cast<Dependencies*>(dependencies);
  runtime::LaunchConfig launch;
  launch.grid = {2, 1, 1};
  launch.block = {kDecodeThreads, 1, 1};
  MOK_RETURN_IF_ERROR(
      runtime::LaunchKernelAddress(DecodeKernelAddress(), launch, &params, sizeof(params)));
  MOK_RETURN_IF_ERROR(runtime::Synchronize());
  Status status = CompareArray("num_tasks", params.num_tasks, {num_tasks});
  const auto actual_tasks = FromDevice(params.tasks, num_tasks);
  const auto actual_dependencies = FromDevice(params.dependencies, num_tasks);
  for (int64_t i = 0; i < num_tasks && status.ok(); ++i) {
    const Task expected = program.Decode(params.queue, i);
    if (std::memcmp(&expected, &actual_tasks[i], sizeof(Task)) != 0 ||
        !SameDependencies(program.DependenciesOf(expected), actual_dependencies[i])) {
      status = InternalError("task ", i, " of queue ", static_cast<int>(params.queue),
                             " differs: ", TaskKindName(expected.kind), " expected, got ",
                             TaskKindName(actual_tasks[i].kind));
    }
  }
  for (void* memory : {count, tasks, dependencies}) MOK_RETURN_IF_ERROR(runtime::Free(memory));
  return status;
}

}  // namespace mok::testing
