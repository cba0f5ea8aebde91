// What the calls of a CUDA workspace have in common: checks, and the C structs as the launchers
// take them.
#pragma once

#include <cmath>
#include <cstdint>

#include "mok_core/status.h"
#include "mok_megakernel/cuda/layer_plan.h"
#include "mok_megakernel/layer_checks.h"
#include "mok_megakernel/mok_cuda.h"
#include "mok_megakernel/sm90/forward_launch.h"
#include "mok_megakernel/sm90/pass_launch.h"

namespace mok {

// WHOLE, STAGE or one of lowest to highest.
Status CheckPart(int32_t part, int32_t lowest, int32_t highest);
// Not null, and aligned to MOK_CUDA_ALIGNMENT.
Status CheckMemory(const char* name, const void* pointer);
Status CheckWidth(const char* name, const MokWeights& weights, int32_t expected);
Status CheckRing(const CudaLayerPlan& plan, const MokContext& context);
Status CheckLimit(float swiglu_limit);
Status CheckIdBytes(int32_t topk_idx_bytes);

PassMode ModeOf(int32_t part);
// The kernel may have less staging than the configuration would use.
ForwardConfig FitToKernel(const ForwardConfig& config, const PassKernelInfo& kernel);
ForwardArguments::Weights WeightsOf(const MokLayer& layer);
ForwardArguments::Context ContextOf(const MokContext& context);
// A ring for a rank to which no route can lead: its maps need an address, though nothing is ever
// loaded from there. x: [ring, H], hidden: [ring, I].
void PlaceEmptyRing(BFloat16* x, BFloat16* hidden, ForwardArguments::Context& context);

// What the arguments of both passes take from the caller.
template <class Arguments, class Args>
void FillFromCall(const MokCudaLayer& layer, const Args& args, Arguments& to) {
  to.tokens.num_tokens = layer.num_tokens;
  to.tokens.x = static_cast<const BFloat16*>(args.layer.x);
  to.tokens.expert_ids = args.topk_idx;
  to.tokens.id_bytes = args.topk_idx_bytes;
  to.tokens.shared_scale = args.layer.shared_scale;
  to.weights = WeightsOf(args.layer);
  to.context = ContextOf(args.context);
  to.swiglu_limit = args.layer.swiglu_limit > 0 ? args.layer.swiglu_limit : INFINITY;
}

// Of a forward or a backward, what Make...Params cannot see. Fields have the names that the host's
// errors give them.
template <class Args>
Status CheckPass(const CudaLayerPlan& plan, const MokCudaLayer& layer, const Args& args) {
  MOK_RETURN_IF_ERROR(CheckMemory("schedule", args.schedule));
  MOK_RETURN_IF_ERROR(CheckMemory("scratch", args.scratch));
  MOK_RETURN_IF_ERROR(CheckRing(plan, args.context));
  MOK_RETURN_IF_ERROR(CheckLimit(args.layer.swiglu_limit));
  MOK_RETURN_IF_ERROR(CheckIdBytes(args.topk_idx_bytes));
  MOK_RETURN_IF_ERROR(CheckUnused(args.layer));
  MOK_RETURN_IF_ERROR(CheckWidth("routed", args.layer.routed, layer.intermediate));
  return CheckWidth("shared", args.layer.shared, layer.shared_intermediate);
}

}  // namespace mok
