#include "mok_megakernel/cuda/call_checks.h"

#include <algorithm>
#include <cmath>

#include "mok_core/argument_checks.h"

namespace mok {
namespace {

const BFloat16* Rows(const void* pointer) { return static_cast<const BFloat16*>(pointer); }
BFloat16* Rows(void* pointer) { return static_cast<BFloat16*>(pointer); }

}  // namespace

Status CheckPart(int32_t part, int32_t lowest, int32_t highest) {
  const bool is_stage = part == MOK_CUDA_WHOLE || part == MOK_CUDA_STAGE;
  if (is_stage || (part >= lowest && part <= highest)) return OkStatus();
  return InvalidArgumentError("part: expected ", MOK_CUDA_WHOLE, ", ", MOK_CUDA_STAGE, " or ",
                              lowest, " to ", highest, ", got ", part);
}

Status CheckMemory(const char* name, const void* pointer) {
  return CheckAligned(name, pointer, MOK_CUDA_ALIGNMENT);
}

Status CheckWidth(const char* name, const MokWeights& weights, int32_t expected) {
  if (weights.intermediate == expected) return OkStatus();
  return InvalidArgumentError(name, ".intermediate: expected ", expected, ", the layer's, got ",
                              weights.intermediate);
}

Status CheckRing(const CudaLayerPlan& plan, const MokContext& context) {
  if (context.ring_rows >= plan.config.ring_rows() || !plan.may_have_rows) return OkStatus();
  return InvalidArgumentError("context.ring_rows: expected at least ", plan.config.ring_rows(),
                              ", got ", context.ring_rows);
}

Status CheckLimit(float swiglu_limit) {
  if (!std::isnan(swiglu_limit)) return OkStatus();
  return InvalidArgumentError("swiglu_limit: expected a number, got NaN");
}

Status CheckIdBytes(int32_t topk_idx_bytes) {
  if (topk_idx_bytes == 4 || topk_idx_bytes == 8) return OkStatus();
  return InvalidArgumentError("topk_idx_bytes: expected 4 or 8, got ", topk_idx_bytes);
}

PassMode ModeOf(int32_t part) {
  return part == MOK_CUDA_EXCHANGE ? PassMode::kExchangeAndCompute
         : part == MOK_CUDA_REDUCE ? PassMode::kReduceOnly
                                   : PassMode::kWhole;
}

ForwardConfig FitToKernel(const ForwardConfig& config, const PassKernelInfo& kernel) {
  ForwardConfig fit = config;
  fit.chunk_bytes = std::min(config.chunk_bytes, kernel.max_chunk_bytes);
  fit.dedicated_chunk_bytes =
      std::min(config.dedicated_chunk_bytes, kernel.max_dedicated_chunk_bytes);
  return fit;
}

ForwardArguments::Weights WeightsOf(const MokLayer& layer) {
  return {Rows(layer.routed.gate), Rows(layer.routed.up), Rows(layer.routed.down),
          Rows(layer.shared.gate), Rows(layer.shared.up), Rows(layer.shared.down)};
}

ForwardArguments::Context ContextOf(const MokContext& context) {
  return {Rows(context.ring_x), Rows(context.ring_gate), Rows(context.ring_up),
          Rows(context.shared_gate), Rows(context.shared_up)};
}

void PlaceEmptyRing(BFloat16* x, BFloat16* hidden, ForwardArguments::Context& context) {
  context.ring_x = x;
  context.ring_gate = context.ring_up = hidden;
}

}  // namespace mok
