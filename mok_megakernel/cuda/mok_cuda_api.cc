// The C API of the CUDA path: opaque objects, checks of its structs.
#include <cmath>
#include <cstddef>
#include <utility>

#include "mok_core/argument_checks.h"
#include "mok_core/device/runtime.h"
#include "mok_megakernel/api_error.h"
#include "mok_megakernel/call_memory.h"
#include "mok_megakernel/cuda/cuda_workspace.h"
#include "mok_megakernel/cuda/matmul.h"
#include "mok_megakernel/mok_cuda.h"

struct MokCudaWorkspace {
  mok::CudaWorkspace workspace;
};

namespace mok {
namespace {

StatusOr<CudaWorkspaceShape> ShapeOf(const MokCudaOptions* options) {
  MOK_RETURN_IF_ERROR(CheckPointer("options", options));
  MOK_RETURN_IF_ERROR(CheckStructSize("MokCudaOptions", options->struct_size, sizeof(*options)));
  MOK_RETURN_IF_ERROR(CheckRange("options.ep_size", options->ep_size, 1, MOK_CUDA_MAX_RANKS));
  MOK_RETURN_IF_ERROR(CheckRange("options.rank", options->rank, 0, options->ep_size - 1));
  MOK_RETURN_IF_ERROR(CheckRange("options.max_tokens", options->max_tokens, 0, INT32_MAX));
  MOK_RETURN_IF_ERROR(CheckMultiple("options.hidden", options->hidden, 8, 8));
  MOK_RETURN_IF_ERROR(CheckRange("options.topk", options->topk, 1, INT32_MAX));
  MOK_RETURN_IF_ERROR(CheckRange("options.device", options->device, 0, INT32_MAX));
  MOK_RETURN_IF_ERROR(CheckRange("options.num_sms", options->num_sms, 2, INT32_MAX));
  if (!(options->timeout_seconds > 0) || !(options->timeout_seconds < 1e9)) {
    return InvalidArgumentError("options.timeout_seconds: expected a number in (0, 1e9), got ",
                                options->timeout_seconds);
  }
  CudaWorkspaceShape shape;
  shape.rank = options->rank;
  shape.ep_size = options->ep_size;
  shape.max_tokens = options->max_tokens;
  shape.hidden = options->hidden;
  shape.topk = options->topk;
  shape.device = options->device;
  shape.num_sms = options->num_sms;
  shape.timeout_ns = static_cast<uint64_t>(options->timeout_seconds * 1e9);
  // The tables number routes of all ranks in 32 bits.
  const double routes =
      static_cast<double>(shape.ep_size) * static_cast<double>(shape.max_tokens) * shape.topk;
  if (routes > INT32_MAX / 2) {
    return InvalidArgumentError("options: expected ep_size * max_tokens * topk to be at most ",
                                INT32_MAX / 2, ", got ", shape.ep_size, " * ", shape.max_tokens,
                                " * ", shape.topk);
  }
  MOK_RETURN_IF_ERROR(
      CheckTensorSize("options.max_tokens * topk, hidden",
                      {shape.max_tokens * shape.topk, shape.hidden, sizeof(BFloat16)}));
  return shape;
}

Status FillMemory(const MokCudaOptions* options, MokCudaMemory* memory) {
  MOK_ASSIGN_OR_RETURN(const CudaWorkspaceShape shape, ShapeOf(options));
  MOK_RETURN_IF_ERROR(CheckPointer("memory", memory));
  MOK_RETURN_IF_ERROR(CheckStructSize("MokCudaMemory", memory->struct_size, sizeof(*memory)));
  const CudaHeapLayout heap(shape);
  MOK_ASSIGN_OR_RETURN(memory->error_scratch_bytes, CudaErrorScratchBytes(shape));
  memory->heap_bytes = static_cast<int64_t>(heap.bytes());
  memory->heap_zero_bytes = static_cast<int64_t>(heap.zero_bytes());
  memory->state_bytes = static_cast<int64_t>(CudaStateLayout(shape).bytes());
  memory->record_bytes = sizeof(CudaRecords);
  memory->x_offset = shape.ep_size > 1 ? static_cast<int64_t>(heap.offset(CudaHeapLayout::kX)) : -1;
  return OkStatus();
}

// The kernels are sm_90a code, which no other GPU runs.
Status CheckDevice(const CudaWorkspaceShape& shape) {
  MOK_ASSIGN_OR_RETURN(const int count, runtime::DeviceCount());
  if (count == 0) {
    return UnavailableError(
        "options.device: expected a GPU of compute capability 9.0, CUDA finds no GPU");
  }
  MOK_RETURN_IF_ERROR(CheckRange("options.device", shape.device, 0, count - 1));
  MOK_ASSIGN_OR_RETURN(const runtime::DeviceProperties found, runtime::QueryDevice(shape.device));
  if (found.compute_major != 9 || found.compute_minor != 0) {
    return UnavailableError("options.device: expected a GPU of compute capability 9.0, device ",
                            shape.device, " has ", found.compute_major, ".", found.compute_minor);
  }
  return CheckRange("options.num_sms", shape.num_sms, 2, found.num_multiprocessors);
}

Status Create(const MokCudaOptions* options, const MokCudaAddresses* addresses,
              MokCudaWorkspace** workspace) {
  MOK_ASSIGN_OR_RETURN(const CudaWorkspaceShape shape, ShapeOf(options));
  MOK_RETURN_IF_ERROR(CheckPointer("workspace", workspace));
  MOK_RETURN_IF_ERROR(CheckPointer("addresses", addresses));
  MOK_RETURN_IF_ERROR(
      CheckStructSize("MokCudaAddresses", addresses->struct_size, sizeof(*addresses)));
  MOK_RETURN_IF_ERROR(CheckPointer("addresses.heap_of_rank", addresses->heap_of_rank));
  MOK_RETURN_IF_ERROR(CheckDevice(shape));
  MOK_ASSIGN_OR_RETURN(CudaWorkspace created,
                       CudaWorkspace::Create(shape, addresses->heap_of_rank, addresses->state,
                                             static_cast<CudaRecords*>(addresses->records)));
  *workspace = new MokCudaWorkspace{std::move(created)};
  return OkStatus();
}

Status CheckLayerStruct(const MokCudaLayer* layer) {
  MOK_RETURN_IF_ERROR(CheckPointer("layer", layer));
  MOK_RETURN_IF_ERROR(CheckStructSize("MokCudaLayer", layer->struct_size, sizeof(*layer)));
  return CheckReserved("MokCudaLayer", layer->reserved);
}

Status FillLayerMemory(const MokCudaWorkspace* workspace, const MokCudaLayer* layer,
                       MokCudaLayerMemory* memory) {
  MOK_RETURN_IF_ERROR(CheckPointer("workspace", workspace));
  MOK_RETURN_IF_ERROR(CheckPointer("memory", memory));
  MOK_RETURN_IF_ERROR(CheckLayerStruct(layer));
  MOK_RETURN_IF_ERROR(CheckStructSize("MokCudaLayerMemory", memory->struct_size, sizeof(*memory)));
  MOK_ASSIGN_OR_RETURN(const CudaLayerPlan plan,
                       PlanCudaLayer(workspace->workspace.shape(), *layer));
  memory->ring_rows = plan.config.ring_rows();
  memory->schedule_bytes = plan.schedule.bytes();
  memory->schedule_scratch_bytes = plan.schedule_scratch.bytes();
  memory->forward_scratch_bytes = static_cast<int64_t>(plan.forward_scratch.bytes());
  memory->backward_scratch_bytes = static_cast<int64_t>(plan.backward_scratch.bytes());
  const DeviceSchedule at_zero = plan.schedule.At(nullptr);
  memory->result_offset = reinterpret_cast<intptr_t>(at_zero.result);
  memory->expert_rows_offset = reinterpret_cast<intptr_t>(at_zero.expert_rows);
  return OkStatus();
}

// Runs function(workspace) with checked structs.
template <class Args, class Function>
int32_t GuardCall(MokCudaWorkspace* workspace, const MokCudaLayer* layer, const Args* args,
                  const char* args_name, Function function) {
  return GuardApi([&]() -> Status {
    MOK_RETURN_IF_ERROR(CheckPointer("workspace", workspace));
    MOK_RETURN_IF_ERROR(CheckLayerStruct(layer));
    MOK_RETURN_IF_ERROR(CheckPointer("args", args));
    MOK_RETURN_IF_ERROR(CheckStructSize(args_name, args->struct_size, sizeof(*args)));
    return function(workspace->workspace);
  });
}

}  // namespace
}  // namespace mok

extern "C" {

int32_t mok_cuda_memory(const MokCudaOptions* options, MokCudaMemory* memory) {
  return mok::GuardApi([&] { return mok::FillMemory(options, memory); });
}

int32_t mok_cuda_workspace_create(const MokCudaOptions* options, const MokCudaAddresses* addresses,
                                  MokCudaWorkspace** workspace) {
  return mok::GuardApi([&] { return mok::Create(options, addresses, workspace); });
}

void mok_cuda_workspace_destroy(MokCudaWorkspace* workspace) { delete workspace; }

int32_t mok_cuda_check(MokCudaWorkspace* workspace, void* stream) {
  return mok::GuardApi([&]() -> mok::Status {
    MOK_RETURN_IF_ERROR(mok::CheckPointer("workspace", workspace));
    return workspace->workspace.Check(stream);
  });
}

int32_t mok_cuda_check_ranks(const MokCudaWorkspace* workspace) {
  return mok::GuardApi([&]() -> mok::Status {
    MOK_RETURN_IF_ERROR(mok::CheckPointer("workspace", workspace));
    return workspace->workspace.CheckRanks();
  });
}

int32_t mok_cuda_check_usable(const MokCudaWorkspace* workspace) {
  return mok::GuardApi([&]() -> mok::Status {
    MOK_RETURN_IF_ERROR(mok::CheckPointer("workspace", workspace));
    return workspace->workspace.CheckUsable();
  });
}

int32_t mok_cuda_layer_memory(const MokCudaWorkspace* workspace, const MokCudaLayer* layer,
                              MokCudaLayerMemory* memory) {
  return mok::GuardApi([&] { return mok::FillLayerMemory(workspace, layer, memory); });
}

int32_t mok_cuda_schedule_build(MokCudaWorkspace* workspace, const MokCudaLayer* layer,
                                const MokCudaScheduleArgs* args) {
  return mok::GuardCall(
      workspace, layer, args, "MokCudaScheduleArgs",
      [&](mok::CudaWorkspace& checked) { return checked.BuildSchedule(*layer, *args); });
}

int32_t mok_cuda_forward(MokCudaWorkspace* workspace, const MokCudaLayer* layer,
                         const MokCudaForwardArgs* args) {
  return mok::GuardCall(
      workspace, layer, args, "MokCudaForwardArgs",
      [&](mok::CudaWorkspace& checked) { return checked.Forward(*layer, *args); });
}

int32_t mok_cuda_backward(MokCudaWorkspace* workspace, const MokCudaLayer* layer,
                          const MokCudaBackwardArgs* args) {
  return mok::GuardCall(
      workspace, layer, args, "MokCudaBackwardArgs",
      [&](mok::CudaWorkspace& checked) { return checked.Backward(*layer, *args); });
}

int32_t mok_cuda_report_error(MokCudaWorkspace* workspace, const MokCudaErrorArgs* args) {
  return mok::GuardApi([&]() -> mok::Status {
    MOK_RETURN_IF_ERROR(mok::CheckPointer("workspace", workspace));
    MOK_RETURN_IF_ERROR(mok::CheckPointer("args", args));
    MOK_RETURN_IF_ERROR(mok::CheckStructSize("MokCudaErrorArgs", args->struct_size, sizeof(*args)));
    return workspace->workspace.ReportError(*args);
  });
}

int32_t mok_cuda_matmul(const MokMatmulArgs* args, int32_t device, void* stream) {
  return mok::GuardApi([&] { return mok::CudaMatmul(args, device, stream); });
}

}  // extern "C"
