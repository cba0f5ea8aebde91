#include "mok_megakernel/pass_arguments.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "mok_core/argument_checks.h"
#include "mok_core/dtype.h"
#include "mok_megakernel/api_error.h"
#include "mok_megakernel/call_memory.h"
#include "mok_megakernel/layer_checks.h"

namespace mok {
namespace {

// Aligned to its elements, and not null where it is needed.
struct TensorCheck {
  int64_t element_bytes;
  Status operator()(const char* name, const void* pointer, bool needed) const {
    return needed || pointer != nullptr ? CheckAligned(name, pointer, element_bytes) : OkStatus();
  }
};
constexpr TensorCheck kCheckFloats = {sizeof(float)};

// Experts: MokWeights or MokWeightGrads.
template <class Experts>
Status CheckExperts(const ExpertNames& names, const Experts& experts, const TensorCheck& check,
                    bool needed) {
  MOK_RETURN_IF_ERROR(check(names.gate, experts.gate, needed));
  MOK_RETURN_IF_ERROR(check(names.up, experts.up, needed));
  return check(names.down, experts.down, needed);
}

LayerSizes SizesOf(const WorkspaceShape& shape, const Schedule& schedule) {
  return {schedule.num_tokens, shape.hidden, shape.topk, schedule.table.num_local_experts,
          ElementBytes(shape.dtype)};
}

Status CheckLayer(const WorkspaceShape& shape, const Schedule& schedule, const MokLayer& layer) {
  const TensorCheck check = {ElementBytes(shape.dtype)};
  const bool has_tokens = schedule.num_tokens > 0;
  const bool has_experts = schedule.table.num_local_experts > 0;
  MOK_RETURN_IF_ERROR(check("x", layer.x, has_tokens));
  MOK_RETURN_IF_ERROR(kCheckFloats("topk_weight", layer.topk_weight, has_tokens));
  MOK_RETURN_IF_ERROR(CheckMultiple("routed.intermediate", layer.routed.intermediate, 8, 8));
  MOK_RETURN_IF_ERROR(CheckMultiple("shared.intermediate", layer.shared.intermediate, 0, 8));
  MOK_RETURN_IF_ERROR(CheckExperts(kRoutedNames, layer.routed, check, has_experts));
  MOK_RETURN_IF_ERROR(CheckUnused(layer));
  if (layer.shared.intermediate > 0) {
    MOK_RETURN_IF_ERROR(CheckExperts(kSharedNames, layer.shared, check, true));
  }
  MOK_RETURN_IF_ERROR(kCheckFloats("shared_scale", layer.shared_scale, false));
  // Scratch has rows of this width for the largest batch.
  MOK_RETURN_IF_ERROR(
      CheckTensorSize("max_tokens, shared.intermediate",
                      {shape.max_tokens, layer.shared.intermediate, sizeof(float)}));
  if (std::isnan(layer.swiglu_limit)) {
    return InvalidArgumentError("swiglu_limit: expected a number, got NaN");
  }
  return OkStatus();
}

// uses_ring: of all its rows, not only those that hold routes.
Status CheckContext(const WorkspaceShape& shape, const Schedule& schedule, const MokLayer& layer,
                    const MokContext& context, bool uses_ring) {
  if (context.ring_rows < schedule.ring_rows) {
    return InvalidArgumentError("context.ring_rows: expected at least ", schedule.ring_rows,
                                " (MokScheduleInfo.ring_rows), got ", context.ring_rows);
  }
  const TensorCheck check = {ElementBytes(shape.dtype)};
  const bool has_rows = schedule.table.num_row_blocks() > 0 || (uses_ring && context.ring_rows > 0);
  MOK_RETURN_IF_ERROR(check("context.ring_x", context.ring_x, has_rows));
  MOK_RETURN_IF_ERROR(check("context.ring_gate", context.ring_gate, has_rows));
  MOK_RETURN_IF_ERROR(check("context.ring_up", context.ring_up, has_rows));
  const bool has_shared = layer.shared.intermediate > 0 && schedule.num_tokens > 0;
  MOK_RETURN_IF_ERROR(check("context.shared_gate", context.shared_gate, has_shared));
  return check("context.shared_up", context.shared_up, has_shared);
}

// What tells one layer's ring from another's of the same sizes: of each local expert the first row
// in the ring that is a token of this rank, which must have that token's bits. A ring that passes
// may still be a wrong one (another layer's on the same x, or no row of this rank's).
Status CheckRingHoldsX(const WorkspaceShape& shape, const Schedule& schedule,
                       const MokBackwardArgs& args) {
  if (args.kept_macrobatches == 0) return OkStatus();
  const RoutingTable& table = schedule.table;
  const auto row_bytes = static_cast<size_t>(shape.hidden * ElementBytes(shape.dtype));
  const auto* x = static_cast<const std::byte*>(args.layer.x);
  const auto* ring_x = static_cast<const std::byte*>(args.context.ring_x);
  for (int expert = 0; expert < table.num_local_experts; ++expert) {
    const auto e = static_cast<size_t>(expert);
    const int64_t begin = int64_t{table.expert_block_begin[e]} * kRowBlock;
    const int64_t end = std::min(begin + table.expert_rows[e], schedule.ring_rows);
    for (int64_t row = begin; row < end; ++row) {
      const auto r = static_cast<size_t>(row);
      if (table.source_rank[r] != shape.rank) continue;
      const auto token = static_cast<size_t>(table.source_route[r] / shape.topk);
      if (std::memcmp(ring_x + r * row_bytes, x + token * row_bytes, row_bytes) != 0) {
        return InvalidArgumentError("context.ring_x: row ", row, " is not token ", token,
                                    " of x; is the context of another layer, batch or schedule?");
      }
      break;
    }
  }
  return OkStatus();
}

Status CheckGrads(const char* name, const ExpertNames& names, const MokWeightGrads& grads,
                  DType dtype) {
  const bool any = grads.gate != nullptr || grads.up != nullptr || grads.down != nullptr;
  if (!any) return OkStatus();
  if (grads.dtype != MOK_FP32 && (grads.dtype != MOK_BF16 || dtype != DType::kBf16)) {
    return TypeMismatchError(name, ".dtype: expected fp32", dtype == DType::kBf16 ? " or bf16" : "",
                             ", got ", DTypeName(static_cast<DType>(grads.dtype)));
  }
  const TensorCheck check = {ElementBytes(static_cast<DType>(grads.dtype))};
  return CheckExperts(names, grads, check, false);
}

Status CheckTokenGrads(const WorkspaceShape& shape, bool has_tokens, const MokBackwardArgs& args) {
  const TensorCheck check = {ElementBytes(shape.dtype)};
  MOK_RETURN_IF_ERROR(check("d_out", args.d_out, has_tokens));
  MOK_RETURN_IF_ERROR(check("d_x", args.d_x, has_tokens));
  MOK_RETURN_IF_ERROR(kCheckFloats("d_topk_weight", args.d_topk_weight, has_tokens));
  const bool has_scale = args.layer.shared_scale != nullptr;
  if (args.d_shared_scale != nullptr && !has_scale) {
    return InvalidArgumentError("d_shared_scale: expected null without shared_scale");
  }
  return kCheckFloats("d_shared_scale", args.d_shared_scale, has_tokens && has_scale);
}

// Of what both passes are given.
CallMemory MemoryOf(const LayerSizes& sizes, const MokLayer& layer, const MokContext& context) {
  CallMemory memory;
  memory.Reads("x", layer.x, sizes.rows());
  memory.Reads("topk_weight", layer.topk_weight, sizes.routes());
  AddLayer(sizes, layer, context, memory);
  return memory;
}

}  // namespace

Status CheckForwardArgs(const WorkspaceShape& shape, const Schedule& schedule,
                        const MokForwardArgs* args) {
  MOK_RETURN_IF_ERROR(CheckPointer("args", args));
  MOK_RETURN_IF_ERROR(CheckStructSize("MokForwardArgs", args->struct_size, sizeof(*args)));
  MOK_RETURN_IF_ERROR(CheckLayer(shape, schedule, args->layer));
  MOK_RETURN_IF_ERROR(CheckRange("differentiated", args->differentiated, 0, 1));
  MOK_RETURN_IF_ERROR(CheckRange("clear_spare_rows", args->clear_spare_rows, 0, 1));
  MOK_RETURN_IF_ERROR(
      CheckContext(shape, schedule, args->layer, args->context, args->clear_spare_rows == 1));
  const TensorCheck check = {ElementBytes(shape.dtype)};
  MOK_RETURN_IF_ERROR(check("out", args->out, schedule.num_tokens > 0));
  const LayerSizes sizes = SizesOf(shape, schedule);
  CallMemory memory = MemoryOf(sizes, args->layer, args->context);
  memory.Writes("out", args->out, sizes.rows());
  return memory.Check();
}

Status CheckBackwardArgs(const WorkspaceShape& shape, const Schedule& schedule,
                         const MokBackwardArgs* args) {
  MOK_RETURN_IF_ERROR(CheckPointer("args", args));
  MOK_RETURN_IF_ERROR(CheckStructSize("MokBackwardArgs", args->struct_size, sizeof(*args)));
  MOK_RETURN_IF_ERROR(CheckReserved("MokBackwardArgs", args->reserved));
  MOK_RETURN_IF_ERROR(CheckLayer(shape, schedule, args->layer));
  MOK_RETURN_IF_ERROR(CheckContext(shape, schedule, args->layer, args->context, false));
  MOK_RETURN_IF_ERROR(CheckTokenGrads(shape, schedule.num_tokens > 0, *args));
  MOK_RETURN_IF_ERROR(CheckRange("kept_macrobatches", args->kept_macrobatches, 0, 1));
  MOK_RETURN_IF_ERROR(CheckGrads("d_routed", kRoutedGradNames, args->d_routed, shape.dtype));
  MOK_RETURN_IF_ERROR(CheckGrads("d_shared", kSharedGradNames, args->d_shared, shape.dtype));
  MOK_RETURN_IF_ERROR(CheckWeightGrads(args->layer, args->d_routed, args->d_shared));
  const LayerSizes sizes = SizesOf(shape, schedule);
  CallMemory memory = MemoryOf(sizes, args->layer, args->context);
  memory.Reads("d_out", args->d_out, sizes.rows());
  AddGradients(sizes, *args, memory);
  MOK_RETURN_IF_ERROR(memory.Check());
  return CheckRingHoldsX(shape, schedule, *args);
}

}  // namespace mok
