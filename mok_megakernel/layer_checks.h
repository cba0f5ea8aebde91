// Checks that the calls of the host engine and of GPUs have in common. Errors name the argument as
// mok.h does.
#pragma once

#include <cstdint>

#include "mok_core/status.h"
#include "mok_megakernel/call_memory.h"
#include "mok_megakernel/mok.h"

namespace mok {

struct ExpertNames {
  const char *gate, *up, *down;
};
inline constexpr ExpertNames kRoutedNames = {"routed.gate", "routed.up", "routed.down"};
inline constexpr ExpertNames kSharedNames = {"shared.gate", "shared.up", "shared.down"};
inline constexpr ExpertNames kRoutedGradNames = {"d_routed.gate", "d_routed.up", "d_routed.down"};
inline constexpr ExpertNames kSharedGradNames = {"d_shared.gate", "d_shared.up", "d_shared.down"};

// What the sizes of a layer's tensors follow from.
struct LayerSizes {
  int64_t num_tokens;         // T
  int64_t hidden;             // H
  int64_t topk;               // K
  int64_t num_local_experts;  // El
  int64_t element_bytes;      // of activations and weights

  MatrixSize rows() const { return {num_tokens, hidden, element_bytes}; }
  MatrixSize routes() const { return {num_tokens, topk, sizeof(float)}; }
  MatrixSize scalars() const { return {num_tokens, 1, sizeof(float)}; }
};

// Weights, shared_scale and the context, in which both passes write. What a rank may stage for the
// others (x, d_out, topk_weight) is left to the caller.
void AddLayer(const LayerSizes& sizes, const MokLayer& layer, const MokContext& context,
              CallMemory& memory);
// All that a backward writes but the context. Args: MokBackwardArgs or MokCudaBackwardArgs.
template <class Args>
void AddGradients(const LayerSizes& sizes, const Args& args, CallMemory& memory);

// kInvalidArgument for what would be ignored: tensors of a shared expert that is not there, and a
// `reserved` that is not 0.
Status CheckUnused(const MokLayer& layer);
// The same of gradients, and `accumulate` of both. Their dtypes are the caller's business.
Status CheckWeightGrads(const MokLayer& layer, const MokWeightGrads& d_routed,
                        const MokWeightGrads& d_shared);

// Of mok_matmul and mok_cuda_matmul: everything but the limits of a device.
Status CheckMatmulArgs(const MokMatmulArgs* args);

}  // namespace mok
