#include "mok_megakernel/layer_checks.h"

#include <limits>

#include "mok_core/argument_checks.h"
#include "mok_megakernel/api_error.h"
#include "mok_megakernel/mok_cuda.h"

namespace mok {
namespace {

// Of [experts, intermediate, hidden] and [experts, hidden, intermediate].
struct ExpertSizes {
  int64_t experts, hidden, intermediate, element_bytes;
  MatrixSize gate() const { return {experts * intermediate, hidden, element_bytes}; }
  MatrixSize down() const { return {experts * hidden, intermediate, element_bytes}; }
};

void AddWeights(const ExpertNames& names, const MokWeights& weights, const ExpertSizes& sizes,
                CallMemory& memory) {
  memory.Reads(names.gate, weights.gate, sizes.gate());
  memory.Reads(names.up, weights.up, sizes.gate());
  memory.Reads(names.down, weights.down, sizes.down());
}

void AddWeightGrads(const ExpertNames& names, const MokWeightGrads& grads, const ExpertSizes& sizes,
                    CallMemory& memory) {
  memory.Writes(names.gate, grads.gate, sizes.gate());
  memory.Writes(names.up, grads.up, sizes.gate());
  memory.Writes(names.down, grads.down, sizes.down());
}

int64_t GradBytes(const MokWeightGrads& grads) { return grads.dtype == MOK_FP32 ? 4 : 2; }

// Experts: MokWeights or MokWeightGrads.
template <class Experts>
Status CheckAbsent(const ExpertNames& names, const Experts& experts) {
  const auto check = [](const char* name, const void* pointer) {
    return pointer == nullptr
               ? OkStatus()
               : InvalidArgumentError(name, ": expected null without a shared expert");
  };
  MOK_RETURN_IF_ERROR(check(names.gate, experts.gate));
  MOK_RETURN_IF_ERROR(check(names.up, experts.up));
  return check(names.down, experts.down);
}

}  // namespace

void AddLayer(const LayerSizes& sizes, const MokLayer& layer, const MokContext& context,
              CallMemory& memory) {
  const int64_t bytes = sizes.element_bytes, tokens = sizes.num_tokens, rows = context.ring_rows;
  const int64_t routed = layer.routed.intermediate, shared = layer.shared.intermediate;
  AddWeights(kRoutedNames, layer.routed, {sizes.num_local_experts, sizes.hidden, routed, bytes},
             memory);
  AddWeights(kSharedNames, layer.shared, {1, sizes.hidden, shared, bytes}, memory);
  memory.Reads("shared_scale", layer.shared_scale, sizes.scalars());
  memory.Writes("context.ring_x", context.ring_x, {rows, sizes.hidden, bytes});
  memory.Writes("context.ring_gate", context.ring_gate, {rows, routed, bytes});
  memory.Writes("context.ring_up", context.ring_up, {rows, routed, bytes});
  memory.Writes("context.shared_gate", context.shared_gate, {tokens, shared, bytes});
  memory.Writes("context.shared_up", context.shared_up, {tokens, shared, bytes});
}

template <class Args>
void AddGradients(const LayerSizes& sizes, const Args& args, CallMemory& memory) {
  memory.Writes("d_x", args.d_x, sizes.rows());
  memory.Writes("d_topk_weight", args.d_topk_weight, sizes.routes());
  memory.Writes("d_shared_scale", args.d_shared_scale, sizes.scalars());
  AddWeightGrads(kRoutedGradNames, args.d_routed,
                 {sizes.num_local_experts, sizes.hidden, args.layer.routed.intermediate,
                  GradBytes(args.d_routed)},
                 memory);
  AddWeightGrads(kSharedGradNames, args.d_shared,
                 {1, sizes.hidden, args.layer.shared.intermediate, GradBytes(args.d_shared)},
                 memory);
}

template void AddGradients(const LayerSizes&, const MokBackwardArgs&, CallMemory&);
template void AddGradients(const LayerSizes&, const MokCudaBackwardArgs&, CallMemory&);

Status CheckUnused(const MokLayer& layer) {
  MOK_RETURN_IF_ERROR(CheckReserved("MokLayer", layer.reserved));
  if (layer.shared.intermediate > 0) return OkStatus();
  if (layer.shared_scale != nullptr) {
    return InvalidArgumentError("shared_scale: expected null without a shared expert");
  }
  return CheckAbsent(kSharedNames, layer.shared);
}

Status CheckWeightGrads(const MokLayer& layer, const MokWeightGrads& d_routed,
                        const MokWeightGrads& d_shared) {
  MOK_RETURN_IF_ERROR(CheckRange("d_routed.accumulate", d_routed.accumulate, 0, 1));
  MOK_RETURN_IF_ERROR(CheckRange("d_shared.accumulate", d_shared.accumulate, 0, 1));
  return layer.shared.intermediate > 0 ? OkStatus() : CheckAbsent(kSharedGradNames, d_shared);
}

Status CheckMatmulArgs(const MokMatmulArgs* args) {
  MOK_RETURN_IF_ERROR(CheckPointer("args", args));
  MOK_RETURN_IF_ERROR(CheckStructSize("MokMatmulArgs", args->struct_size, sizeof(*args)));
  MOK_RETURN_IF_ERROR(CheckReserved("MokMatmulArgs", args->reserved));
  MOK_RETURN_IF_ERROR(CheckRange("layout", args->layout, MOK_MATMUL_NT, MOK_MATMUL_TN));
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  MOK_RETURN_IF_ERROR(CheckRange("m", args->m, 0, kMost));
  MOK_RETURN_IF_ERROR(CheckRange("n", args->n, 0, kMost));
  MOK_RETURN_IF_ERROR(CheckRange("k", args->k, 0, kMost));
  if (args->m == 0 || args->n == 0) return OkStatus();
  constexpr int64_t kBytes = sizeof(float);
  CallMemory memory;
  MOK_RETURN_IF_ERROR(CheckAligned("c", args->c, kBytes));
  memory.Writes("c", args->c, {args->m, args->n, kBytes});
  if (args->k > 0) {
    MOK_RETURN_IF_ERROR(CheckAligned("a", args->a, kBytes));
    MOK_RETURN_IF_ERROR(CheckAligned("b", args->b, kBytes));
    memory.Reads("a", args->a, {args->m, args->k, kBytes});
    memory.Reads("b", args->b, {args->n, args->k, kBytes});
  }
  return memory.Check();
}

}  // namespace mok
