#include "mok_megakernel/pass_arguments.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "mok_core/argument_checks.h"
#include "mok_core/dtype.h"
#include "mok_megakernel/api_error.h"
#include "mok_megakernel/engine_config.h"

namespace mok {
namespace {

Status CheckNeeded(const char* name, const void* pointer, bool needed) {
  return needed ? CheckPointer(name, pointer) : OkStatus();
}

struct WeightNames {
  const char* gate;
  const char* up;
  const char* down;
  const char* intermediate;
};
constexpr WeightNames kRoutedNames = {"routed.gate", "routed.up", "routed.down",
                                      "routed.intermediate"};
constexpr WeightNames kSharedNames = {"shared.gate", "shared.up", "shared.down",
                                      "shared.intermediate"};

Status CheckWeights(const MokWeights& weights, const WeightNames& names, bool needed) {
  if (weights.intermediate % 8 != 0 || weights.intermediate > INT32_MAX) {
    return InvalidArgumentError(names.intermediate,
                                ": expected a positive multiple of 8 below 2^31, got ",
                                weights.intermediate);
  }
  MOK_RETURN_IF_ERROR(CheckNeeded(names.gate, weights.gate, needed));
  MOK_RETURN_IF_ERROR(CheckNeeded(names.up, weights.up, needed));
  return CheckNeeded(names.down, weights.down, needed);
}

Status CheckLayer(const Schedule& schedule, const MokLayer& layer) {
  const bool has_tokens = schedule.num_tokens > 0;
  MOK_RETURN_IF_ERROR(CheckNeeded("x", layer.x, has_tokens));
  MOK_RETURN_IF_ERROR(CheckNeeded("topk_weight", layer.topk_weight, has_tokens));
  if (layer.routed.intermediate <= 0) {
    return InvalidArgumentError("routed.intermediate: expected a positive multiple of 8, got ",
                                layer.routed.intermediate);
  }
  if (layer.shared.intermediate < 0) {
    return InvalidArgumentError("shared.intermediate: expected a multiple of 8 >= 0, got ",
                                layer.shared.intermediate);
  }
  const bool has_shared = layer.shared.intermediate > 0;
  const bool has_experts = schedule.table.num_local_experts > 0;
  MOK_RETURN_IF_ERROR(CheckWeights(layer.routed, kRoutedNames, has_experts));
  MOK_RETURN_IF_ERROR(CheckWeights(layer.shared, kSharedNames, has_shared));
  if (layer.shared_scale != nullptr && !has_shared) {
    return InvalidArgumentError("shared_scale: expected null without a shared expert");
  }
  if (std::isnan(layer.swiglu_limit)) {
    return InvalidArgumentError("swiglu_limit: expected a number, got NaN");
  }
  return OkStatus();
}

// uses_ring: of all its rows, not only those that hold routes.
Status CheckContext(const Schedule& schedule, const MokLayer& layer, const MokContext& context,
                    bool uses_ring) {
  if (context.ring_rows < schedule.ring_rows) {
    return InvalidArgumentError("context.ring_rows: expected at least ", schedule.ring_rows,
                                " (MokScheduleInfo.ring_rows), got ", context.ring_rows);
  }
  const bool has_rows = schedule.table.num_row_blocks() > 0 || (uses_ring && context.ring_rows > 0);
  MOK_RETURN_IF_ERROR(CheckNeeded("context.ring_x", context.ring_x, has_rows));
  MOK_RETURN_IF_ERROR(CheckNeeded("context.ring_gate", context.ring_gate, has_rows));
  MOK_RETURN_IF_ERROR(CheckNeeded("context.ring_up", context.ring_up, has_rows));
  const bool has_shared = layer.shared.intermediate > 0 && schedule.num_tokens > 0;
  MOK_RETURN_IF_ERROR(CheckNeeded("context.shared_gate", context.shared_gate, has_shared));
  return CheckNeeded("context.shared_up", context.shared_up, has_shared);
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

Status CheckGradDType(const char* name, const MokWeightGrads& grads, DType dtype) {
  const bool any = grads.gate != nullptr || grads.up != nullptr || grads.down != nullptr;
  if (!any || grads.dtype == MOK_FP32 || (grads.dtype == MOK_BF16 && dtype == DType::kBf16)) {
    return OkStatus();
  }
  return TypeMismatchError(name, ".dtype: expected fp32", dtype == DType::kBf16 ? " or bf16" : "",
                           ", got ", DTypeName(static_cast<DType>(grads.dtype)));
}

}  // namespace

Status CheckForwardArgs(const WorkspaceShape&, const Schedule& schedule,
                        const MokForwardArgs* args) {
  MOK_RETURN_IF_ERROR(CheckPointer("args", args));
  MOK_RETURN_IF_ERROR(CheckStructSize("MokForwardArgs", args->struct_size, sizeof(*args)));
  MOK_RETURN_IF_ERROR(CheckLayer(schedule, args->layer));
  if (args->differentiated != 0 && args->differentiated != 1) {
    return InvalidArgumentError("differentiated: expected 0 or 1, got ", args->differentiated);
  }
  if (args->clear_spare_rows != 0 && args->clear_spare_rows != 1) {
    return InvalidArgumentError("clear_spare_rows: expected 0 or 1, got ", args->clear_spare_rows);
  }
  MOK_RETURN_IF_ERROR(
      CheckContext(schedule, args->layer, args->context, args->clear_spare_rows == 1));
  return CheckNeeded("out", args->out, schedule.num_tokens > 0);
}

Status CheckBackwardArgs(const WorkspaceShape& shape, const Schedule& schedule,
                         const MokBackwardArgs* args) {
  MOK_RETURN_IF_ERROR(CheckPointer("args", args));
  MOK_RETURN_IF_ERROR(CheckStructSize("MokBackwardArgs", args->struct_size, sizeof(*args)));
  MOK_RETURN_IF_ERROR(CheckLayer(schedule, args->layer));
  MOK_RETURN_IF_ERROR(CheckContext(schedule, args->layer, args->context, false));
  const bool has_tokens = schedule.num_tokens > 0;
  MOK_RETURN_IF_ERROR(CheckNeeded("d_out", args->d_out, has_tokens));
  MOK_RETURN_IF_ERROR(CheckNeeded("d_x", args->d_x, has_tokens));
  MOK_RETURN_IF_ERROR(CheckNeeded("d_topk_weight", args->d_topk_weight, has_tokens));
  const bool has_scale = args->layer.shared_scale != nullptr;
  MOK_RETURN_IF_ERROR(CheckNeeded("d_shared_scale", args->d_shared_scale, has_tokens && has_scale));
  if (args->d_shared_scale != nullptr && !has_scale) {
    return InvalidArgumentError("d_shared_scale: expected null without shared_scale");
  }
  if (args->kept_macrobatches != 0 && args->kept_macrobatches != 1) {
    return InvalidArgumentError("kept_macrobatches: expected 0 or 1, got ",
                                args->kept_macrobatches);
  }
  MOK_RETURN_IF_ERROR(CheckGradDType("d_routed", args->d_routed, shape.dtype));
  MOK_RETURN_IF_ERROR(CheckGradDType("d_shared", args->d_shared, shape.dtype));
  return CheckRingHoldsX(shape, schedule, *args);
}

}  // namespace mok
