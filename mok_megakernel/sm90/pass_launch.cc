#include "mok_megakernel/sm90/pass_launch.h"

#include <algorithm>

#include "mok_core/argument_checks.h"
#include "mok_core/bits.h"
#include "mok_core/device/runtime.h"
#include "mok_schedule/routing_table.h"
#include "mok_schedule/task.h"

namespace mok {
namespace {

constexpr uint32_t kThreads = 384;
constexpr size_t kAlignment = 256;
// Counter families (CounterFamily) of the pass that has more of them. A test compares the counters
// with those that programs use.
constexpr int64_t kCountersPerPass = 3;
constexpr int64_t kCounterFamiliesPerSlot = 6;
constexpr int64_t kCounterFamiliesPerTokenBlock = 4;

template <class T>
T* PartAt(void* base, size_t offset) {
  return reinterpret_cast<T*>(static_cast<std::byte*>(base) + offset);
}

}  // namespace

size_t MemoryPlan::Place(int64_t bytes) {
  const size_t begin = bytes_;
  bytes_ += RoundUp(static_cast<size_t>(bytes), kAlignment);
  return begin;
}

PassMemoryLayout::PassMemoryLayout(const ForwardLayerShape& shape, const ForwardConfig& config) {
  const int64_t token_blocks = CeilDiv<int64_t>(shape.max_tokens, kRowBlock);
  num_counters_ = kCountersPerPass + kCounterFamiliesPerSlot * config.macrobatch_blocks +
                  kCounterFamiliesPerTokenBlock * token_blocks + shape.num_local_experts;
  state_ = plan_.Place(sizeof(PassState));
  abort_flag_ = plan_.Place(sizeof(uint32_t));
  counters_ = plan_.Place(num_counters_ * static_cast<int64_t>(sizeof(uint64_t)));
}

PassMemory PassMemoryLayout::At(void* base) const {
  return {PartAt<PassState>(base, state_), PartAt<uint32_t>(base, abort_flag_),
          PartAt<uint64_t>(base, counters_)};
}

PassSignals MakePassSignals(const PassMemory& memory, DeviceWaitRecord* record, uint64_t timeout_ns,
                            int32_t rank) {
  const DeviceWaitParams wait = {record, memory.abort_flag, timeout_ns, rank};
  PassSignals signals = {memory.counters, memory.state, wait, wait};
  signals.wait.timeout_ns *= 2;
  return signals;
}

Status CheckTensor(const char* name, const void* pointer) {
  return CheckAligned(name, pointer, kTensorAlignment);
}

Status CheckChunks(const ForwardConfig& config, const PassKernelInfo& kernel) {
  if (config.chunk_bytes <= kernel.max_chunk_bytes &&
      config.dedicated_chunk_bytes <= kernel.max_dedicated_chunk_bytes) {
    return OkStatus();
  }
  return InvalidArgumentError("chunks of ", config.chunk_bytes, " and ",
                              config.dedicated_chunk_bytes, " bytes, expected at most ",
                              kernel.max_chunk_bytes, " and ", kernel.max_dedicated_chunk_bytes);
}

int32_t TilesOf(int64_t width, int64_t columns) {
  return static_cast<int32_t>(CeilDiv(width, columns));
}

Status EncodeRows(const BFloat16* base, int64_t rows, int64_t columns, const BFloat16* spare,
                  TensorMap& map) {
  MOK_ASSIGN_OR_RETURN(
      const runtime::TensorMapSpec spec,
      ActivationMapSpec(rows > 0 ? base : spare, std::max<int64_t>(rows, 1), columns, columns));
  MOK_ASSIGN_OR_RETURN(map, runtime::EncodeTensorMap(spec));
  return OkStatus();
}

Status EncodeWeights(const WeightMatrix& matrix, ColumnOrder order, int32_t half_columns,
                     TensorMap& map) {
  if (matrix.experts == 0) return OkStatus();
  MOK_ASSIGN_OR_RETURN(const runtime::TensorMapSpec spec,
                       WeightMapSpec(matrix, order, half_columns));
  MOK_ASSIGN_OR_RETURN(map, runtime::EncodeTensorMap(spec));
  return OkStatus();
}

RowExchange MakeRowExchange(const RowSources& sources, int64_t hidden, int32_t own_rank) {
  RowExchange rows = {};
  rows.sources = sources;
  rows.peers.row_bytes = 2 * hidden;
  rows.routes_per_row = 1;
  rows.own_rank = own_rank;
  return rows;
}

Status LaunchPass(const PassKernelInfo& kernel, const PassLaunch& launch, int32_t num_comm_sms,
                  const void* params, size_t params_bytes, const char* name) {
  if (launch.num_blocks <= num_comm_sms) {
    return InvalidArgumentError("num_blocks is ", launch.num_blocks, ", expected more than the ",
                                num_comm_sms, " that only exchange");
  }
  runtime::LaunchConfig config;
  config.grid = {static_cast<uint32_t>(launch.num_blocks), 1, 1};
  config.block = {kThreads, 1, 1};
  config.shared_bytes = kernel.shared_bytes;
  config.registers_per_thread = kSm90LaunchRegisters;
  config.device = launch.device;
  config.stream = launch.stream;
  config.name = name;
  return runtime::LaunchKernelAddress(kernel.address, config, params, params_bytes);
}

const char* PassRoleName(int32_t role) {
  static constexpr const char* kNames[] = {"consumer", "producer", "scheduler",
                                           "pull",     "push",     "meeting"};
  return role >= 0 && role < 6 ? kNames[role] : "unknown";
}

Status CheckPassRecord(const DeviceWaitRecord& record) {
  if (record.state == 2 && record.role == static_cast<int32_t>(PassRole::kMeeting)) {
    if (record.task_kind < 0) {  // kStart, which comes before all tasks
      return DeadlineExceededError(
          "rank ", record.rank, " waited ", record.waited_ns / 1000000, " ms for rank ",
          record.task, " at the start of pass ", record.expected,
          ", a backward; the last that it has started is ", "pass ", record.observed);
    }
    const bool is_entry = record.task_kind == static_cast<int32_t>(TaskKind::kEntryBarrier);
    return DeadlineExceededError("rank ", record.rank, " waited ", record.waited_ns / 1000000,
                                 " ms for rank ", record.task, " at the ",
                                 is_entry ? "entry" : "exit", " of pass ", record.expected,
                                 ", which it last reached in pass ", record.observed);
  }
  return CheckDeviceWaitRecord(record, {PassRoleName, [](int32_t value) {
                                          return TaskKindName(static_cast<TaskKind>(value));
                                        }});
}

}  // namespace mok
