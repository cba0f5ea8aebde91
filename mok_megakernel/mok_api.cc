// The C API: opaque objects, and the one place where errors become codes and exceptions end.
#include "mok_megakernel/mok.h"

#include <chrono>
#include <cmath>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "mok_comm/symmetric_heap.h"
#include "mok_core/argument_checks.h"
#include "mok_core/dtype.h"
#include "mok_core/status.h"
#include "mok_gemm/host/isa.h"
#include "mok_megakernel/api_error.h"
#include "mok_megakernel/call_memory.h"
#include "mok_megakernel/engine_config.h"
#include "mok_megakernel/host_engine.h"
#include "mok_megakernel/in_process_group.h"
#include "mok_megakernel/matmul.h"
#include "mok_megakernel/saved_schedule.h"
#include "mok_megakernel/schedule.h"
#include "mok_megakernel/workspace.h"
#include "mok_schedule/task.h"

struct MokWorkspace {
  std::unique_ptr<mok::Workspace> workspace;
};
struct MokSchedule {
  std::unique_ptr<mok::Schedule> schedule;
};
struct MokInProcessGroup {
  explicit MokInProcessGroup(int ep_size) : group(ep_size) {}
  mok::InProcessGroup group;
};

static_assert(MOK_BF16 == static_cast<int>(mok::DType::kBf16));
static_assert(MOK_FP32 == static_cast<int>(mok::DType::kFp32));
static_assert(MOK_OP_SCHEDULE == static_cast<int>(mok::Operation::kSchedule));
static_assert(MOK_OP_BACKWARD == static_cast<int>(mok::Operation::kBackward));
static_assert(MOK_NUM_ISAS == static_cast<int>(mok::Isa::kAvx512Bf16) + 1);

namespace mok {
namespace {

// Runs function(workspace) under the workspace's lock, unless the workspace is broken.
template <class Function>
int32_t GuardLocked(MokWorkspace* handle, Function function) {
  return GuardApi([&]() -> Status {
    MOK_RETURN_IF_ERROR(CheckPointer("workspace", handle));
    Workspace& workspace = *handle->workspace;
    const auto lock = workspace.lock();
    MOK_RETURN_IF_ERROR(workspace.CheckUsable());
    return function(workspace);
  });
}

Status CheckHeap(const MokWorkspaceOptions& options) {
  const int providers = (options.heap_name != nullptr) + (options.group != nullptr);
  if (providers != (options.ep_size > 1 ? 1 : 0)) {
    return InvalidArgumentError("heap_name, group: expected ",
                                options.ep_size > 1 ? "exactly one" : "none of them",
                                " with ep_size ", options.ep_size, ", got ", providers);
  }
  return options.heap_name != nullptr ? CheckSharedMemoryName("heap_name", options.heap_name)
                                      : OkStatus();
}

Status CheckOptions(const MokWorkspaceOptions& options) {
  MOK_RETURN_IF_ERROR(CheckReserved("MokWorkspaceOptions", options.reserved));
  MOK_RETURN_IF_ERROR(CheckRange("ep_size", options.ep_size, 1, MOK_MAX_RANKS));
  MOK_RETURN_IF_ERROR(CheckRange("rank", options.rank, 0, options.ep_size - 1));
  MOK_RETURN_IF_ERROR(CheckRange("max_tokens", options.max_tokens, 0, INT32_MAX));
  MOK_RETURN_IF_ERROR(CheckMultiple("hidden", options.hidden, 8, 8));
  MOK_RETURN_IF_ERROR(CheckRange("topk", options.topk, 1, INT32_MAX));
  MOK_RETURN_IF_ERROR(
      CheckRange("max_tokens * topk", options.max_tokens * options.topk, 0, INT32_MAX));
  if (options.dtype != MOK_BF16 && options.dtype != MOK_FP32) {
    return TypeMismatchError("dtype: expected bf16 (0) or fp32 (1), got ", options.dtype);
  }
  MOK_RETURN_IF_ERROR(CheckTensorSize("max_tokens * topk, hidden",
                                      {options.max_tokens * options.topk, options.hidden,
                                       ElementBytes(static_cast<DType>(options.dtype))}));
  if (!(options.timeout_seconds > 0) || !(options.timeout_seconds < 1e9)) {
    return InvalidArgumentError("timeout_seconds: expected a number in (0, 1e9), got ",
                                options.timeout_seconds);
  }
  return CheckHeap(options);
}

StatusOr<std::unique_ptr<SymmetricHeap>> OpenHeap(const MokWorkspaceOptions& options,
                                                  const WorkspaceShape& shape) {
  if (options.group != nullptr) return options.group->group.TakeHeap(shape);
  const size_t bytes = LayOutHeap(shape).bytes;
  if (options.heap_name == nullptr) {
    MOK_ASSIGN_OR_RETURN(auto heaps, CreateInProcessHeaps(1, bytes));
    return std::move(heaps.front());
  }
  PosixSharedMemoryOptions heap_options;
  heap_options.name = options.heap_name;
  heap_options.rank = shape.rank;
  heap_options.size = shape.ep_size;
  heap_options.bytes = bytes;
  heap_options.timeout = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::duration<double>(options.timeout_seconds));
  StatusOr<std::unique_ptr<SymmetricHeap>> heap = CreatePosixSharedMemoryHeap(heap_options);
  if (heap.ok()) return heap;
  return Status(heap.status().code(),
                StrCat(heap.status().message(), " [rank ", shape.rank, " has max_tokens ",
                       shape.max_tokens, ", hidden ", shape.hidden, ", topk ", shape.topk,
                       ", dtype ", DTypeName(shape.dtype), "]"));
}

StatusOr<std::unique_ptr<Workspace>> CreateWorkspace(const MokWorkspaceOptions& options) {
  WorkspaceShape shape;
  shape.rank = options.rank;
  shape.ep_size = options.ep_size;
  shape.max_tokens = options.max_tokens;
  shape.hidden = options.hidden;
  shape.topk = options.topk;
  shape.dtype = static_cast<DType>(options.dtype);
  MOK_ASSIGN_OR_RETURN(std::unique_ptr<SymmetricHeap> heap, OpenHeap(options, shape));
  auto workspace = std::make_unique<Workspace>(
      shape, std::move(heap),
      std::chrono::nanoseconds(static_cast<int64_t>(options.timeout_seconds * 1e9)));
  if (options.heap_name != nullptr) {
    // Shapes of different sizes have failed already; these are the ones of the same size.
    MOK_RETURN_IF_ERROR(workspace->Meet(workspace->NewRecord(Operation::kCreate), {}));
  }
  return workspace;
}

StatusOr<int64_t> CapacityRows(int64_t num_tokens_total, int32_t topk, int32_t num_local_experts) {
  MOK_RETURN_IF_ERROR(CheckRange("num_tokens_total", num_tokens_total, 0, INT64_MAX));
  MOK_RETURN_IF_ERROR(CheckRange("topk", topk, 0, INT32_MAX));
  MOK_RETURN_IF_ERROR(CheckRange("num_local_experts", num_local_experts, 0, INT32_MAX));
  // Every expert may add a row block of padding.
  int64_t routes = 0, rows = 0;
  if (__builtin_mul_overflow(num_tokens_total, int64_t{topk}, &routes) ||
      __builtin_add_overflow(routes, int64_t{num_local_experts} * kRowBlock, &rows)) {
    return InvalidArgumentError("num_tokens_total * topk: expected rows that fit int64, got ",
                                num_tokens_total, " * ", topk);
  }
  return RoutingTableCapacityRows(num_tokens_total, topk, num_local_experts);
}

// Words of a saved schedule, in the caller's memory.
StatusOr<size_t> CheckWords(const int32_t* words, int64_t num_words) {
  MOK_RETURN_IF_ERROR(CheckAligned("words", words, sizeof(int32_t)));
  MOK_RETURN_IF_ERROR(CheckRange("num_words", num_words, 0, INT64_MAX / 4));
  return static_cast<size_t>(num_words);
}

Status FillScheduleInfo(const Schedule& schedule, MokScheduleInfo* info) {
  MOK_RETURN_IF_ERROR(CheckStructSize("MokScheduleInfo", info->struct_size, sizeof(*info)));
  info->num_tokens = schedule.num_tokens;
  info->num_tokens_total = schedule.num_tokens_total;
  info->num_experts = schedule.num_experts;
  info->num_local_experts = schedule.table.num_local_experts;
  info->first_expert = schedule.first_expert;
  info->num_macrobatches = static_cast<int32_t>(schedule.Ring(kRowBlock).num_macrobatches());
  info->num_rows = schedule.table.num_valid_rows();
  info->num_row_blocks = schedule.table.num_row_blocks();
  info->minibatch_rows = schedule.minibatch_rows;
  info->ring_rows = schedule.ring_rows;
  return OkStatus();
}

const Schedule* Unwrap(const MokSchedule* schedule) {
  return schedule == nullptr ? nullptr : schedule->schedule.get();
}

}  // namespace
}  // namespace mok

extern "C" {

int32_t mok_api_version(void) { return MOK_API_VERSION; }

const char* mok_isa_name(int32_t isa) {
  if (isa < 0 || isa >= MOK_NUM_ISAS) return "unknown";
  return mok::IsaName(static_cast<mok::Isa>(isa));
}

int32_t mok_isa_supported(int32_t isa) {
  if (isa < 0 || isa >= MOK_NUM_ISAS) return 0;
  return mok::IsaSupported(static_cast<mok::Isa>(isa)) ? 1 : 0;
}

int32_t mok_best_isa(void) { return static_cast<int32_t>(mok::BestIsa()); }

int32_t mok_num_cores(void) { return mok::NumCores(); }

int32_t mok_trace_create(int32_t num_workers, int64_t events_per_worker, MokTrace** trace) {
  return mok::GuardApi([&]() -> mok::Status {
    MOK_RETURN_IF_ERROR(mok::CheckPointer("trace", trace));
    MOK_RETURN_IF_ERROR(mok::CheckRange("num_workers", num_workers, 1, 2 * MOK_MAX_THREADS));
    MOK_RETURN_IF_ERROR(mok::CheckRange("events_per_worker", events_per_worker, 0, INT64_MAX));
    MOK_RETURN_IF_ERROR(
        mok::CheckTensorSize("num_workers, events_per_worker",
                             {num_workers, events_per_worker, int64_t{sizeof(mok::TraceEvent)}}));
    *trace = new MokTrace(num_workers, events_per_worker);
    return mok::OkStatus();
  });
}

void mok_trace_destroy(MokTrace* trace) { delete trace; }

int32_t mok_trace_write(const MokTrace* trace, const char* path) {
  return mok::GuardApi([&]() -> mok::Status {
    MOK_RETURN_IF_ERROR(mok::CheckPointer("trace", trace));
    MOK_RETURN_IF_ERROR(mok::CheckPointer("path", path));
    const auto kind_name = [](int32_t kind) -> std::string {
      return mok::TaskKindName(static_cast<mok::TaskKind>(kind));
    };
    return trace->recorder.WriteChromeTrace(path, kind_name, trace->rank);
  });
}

int32_t mok_in_process_group_create(int32_t ep_size, MokInProcessGroup** group) {
  return mok::GuardApi([&]() -> mok::Status {
    MOK_RETURN_IF_ERROR(mok::CheckPointer("group", group));
    MOK_RETURN_IF_ERROR(mok::CheckRange("ep_size", ep_size, 1, MOK_MAX_RANKS));
    *group = new MokInProcessGroup(ep_size);
    return mok::OkStatus();
  });
}

void mok_in_process_group_destroy(MokInProcessGroup* group) { delete group; }

int32_t mok_workspace_create(const MokWorkspaceOptions* options, MokWorkspace** workspace) {
  return mok::GuardApi([&]() -> mok::Status {
    MOK_RETURN_IF_ERROR(mok::CheckPointer("options", options));
    MOK_RETURN_IF_ERROR(mok::CheckPointer("workspace", workspace));
    MOK_RETURN_IF_ERROR(
        mok::CheckStructSize("MokWorkspaceOptions", options->struct_size, sizeof(*options)));
    MOK_RETURN_IF_ERROR(mok::CheckOptions(*options));
    MOK_ASSIGN_OR_RETURN(auto created, mok::CreateWorkspace(*options));
    *workspace = new MokWorkspace{std::move(created)};
    return mok::OkStatus();
  });
}

void mok_workspace_destroy(MokWorkspace* workspace) { delete workspace; }

int32_t mok_workspace_check(const MokWorkspace* workspace) {
  return mok::GuardApi([&]() -> mok::Status {
    MOK_RETURN_IF_ERROR(mok::CheckPointer("workspace", workspace));
    return workspace->workspace->CheckUsable();
  });
}

int32_t mok_workspace_info(const MokWorkspace* workspace, MokWorkspaceInfo* info) {
  return mok::GuardApi([&]() -> mok::Status {
    MOK_RETURN_IF_ERROR(mok::CheckPointer("workspace", workspace));
    MOK_RETURN_IF_ERROR(mok::CheckPointer("info", info));
    MOK_RETURN_IF_ERROR(mok::CheckStructSize("MokWorkspaceInfo", info->struct_size, sizeof(*info)));
    const auto lock = workspace->workspace->lock();
    info->heap_bytes = static_cast<int64_t>(workspace->workspace->regions().bytes);
    info->scratch_bytes = static_cast<int64_t>(workspace->workspace->scratch().bytes());
    info->num_threads = workspace->workspace->pool().num_threads();
    info->reserved = 0;
    return mok::OkStatus();
  });
}

int32_t mok_workspace_poison(MokWorkspace* workspace) {
  return mok::GuardLocked(workspace, [](mok::Workspace& locked) {
    locked.Poison();
    return mok::OkStatus();
  });
}

int32_t mok_workspace_report_error(MokWorkspace* workspace, int32_t operation, int32_t code,
                                   const char* message) {
  return mok::GuardLocked(workspace, [&](mok::Workspace& locked) -> mok::Status {
    if (operation < MOK_OP_SCHEDULE || operation > MOK_OP_BACKWARD) {
      return mok::InvalidArgumentError("operation: expected a MokOperation, got ", operation);
    }
    if (code <= MOK_OK || code > MOK_INTERNAL) {
      return mok::InvalidArgumentError("code: expected an error of MokStatusCode, got ", code);
    }
    return locked.MeetWithError(
        static_cast<mok::Operation>(operation),
        mok::Status(static_cast<mok::StatusCode>(code), message == nullptr ? "" : message));
  });
}

int32_t mok_schedule_build(MokWorkspace* workspace, const MokEngineConfig* config,
                           const MokScheduleArgs* args, MokSchedule** schedule) {
  return mok::GuardLocked(workspace, [&](mok::Workspace& locked) -> mok::Status {
    if (schedule == nullptr) {
      return locked.MeetWithError(mok::Operation::kSchedule, mok::NullPointer("schedule"));
    }
    MOK_ASSIGN_OR_RETURN(auto built, mok::BuildSchedule(locked, config, args));
    *schedule = new MokSchedule{std::move(built)};
    return mok::OkStatus();
  });
}

void mok_schedule_destroy(MokSchedule* schedule) { delete schedule; }

int32_t mok_schedule_info(const MokSchedule* schedule, MokScheduleInfo* info) {
  return mok::GuardApi([&]() -> mok::Status {
    MOK_RETURN_IF_ERROR(mok::CheckPointer("schedule", schedule));
    MOK_RETURN_IF_ERROR(mok::CheckPointer("info", info));
    return mok::FillScheduleInfo(*schedule->schedule, info);
  });
}

int32_t mok_schedule_tokens_per_expert(const MokSchedule* schedule, int64_t* counts) {
  return mok::GuardApi([&]() -> mok::Status {
    MOK_RETURN_IF_ERROR(mok::CheckPointer("schedule", schedule));
    const auto& rows = schedule->schedule->table.expert_rows;
    if (!rows.empty()) {
      MOK_RETURN_IF_ERROR(mok::CheckAligned("counts", counts, sizeof(int64_t)));
    }
    for (size_t expert = 0; expert < rows.size(); ++expert) counts[expert] = rows[expert];
    return mok::OkStatus();
  });
}

int64_t mok_schedule_capacity_rows(int64_t num_tokens_total, int32_t topk,
                                   int32_t num_local_experts) {
  int64_t rows = -1;
  mok::GuardApi([&]() -> mok::Status {
    MOK_ASSIGN_OR_RETURN(rows, mok::CapacityRows(num_tokens_total, topk, num_local_experts));
    return mok::OkStatus();
  });
  return rows;
}

int32_t mok_schedule_save(const MokSchedule* schedule, int32_t* words, int64_t num_words) {
  return mok::GuardApi([&]() -> mok::Status {
    MOK_RETURN_IF_ERROR(mok::CheckPointer("schedule", schedule));
    MOK_ASSIGN_OR_RETURN(const size_t size, mok::CheckWords(words, num_words));
    return mok::SaveSchedule(*schedule->schedule, std::span<int32_t>(words, size));
  });
}

int32_t mok_schedule_load(const int32_t* words, int64_t num_words, MokSchedule** schedule) {
  return mok::GuardApi([&]() -> mok::Status {
    MOK_ASSIGN_OR_RETURN(const size_t size, mok::CheckWords(words, num_words));
    MOK_RETURN_IF_ERROR(mok::CheckPointer("schedule", schedule));
    MOK_ASSIGN_OR_RETURN(auto loaded, mok::LoadSchedule(std::span<const int32_t>(words, size)));
    *schedule = new MokSchedule{std::move(loaded)};
    return mok::OkStatus();
  });
}

int32_t mok_forward(MokWorkspace* workspace, const MokEngineConfig* config,
                    const MokSchedule* schedule, const MokForwardArgs* args) {
  return mok::GuardLocked(workspace, [&](mok::Workspace& locked) {
    return mok::RunForward(locked, config, mok::Unwrap(schedule), args);
  });
}

int32_t mok_backward(MokWorkspace* workspace, const MokEngineConfig* config,
                     const MokSchedule* schedule, const MokBackwardArgs* args) {
  return mok::GuardLocked(workspace, [&](mok::Workspace& locked) {
    return mok::RunBackward(locked, config, mok::Unwrap(schedule), args);
  });
}

int32_t mok_matmul(const MokMatmulArgs* args) {
  return mok::GuardApi([&] { return mok::Matmul(args); });
}

}  // extern "C"
