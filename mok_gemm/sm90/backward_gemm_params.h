// Parameters of the kernel that runs the backward's tiles without a layer around them, for tests
// and rates. Shared by host and device code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mok_gemm/sm90/backward_task.h"
#include "mok_gemm/sm90/grouped_gemm_params.h"

namespace mok::testing {

// What a launch computes; their inputs and outputs are independent. Tiles of all products of a
// launch take turns in every block.
enum BackwardProduct : uint32_t {
  kProductDownGrad = 1,
  kProductInputGrad = 2,
  kProductWeightGrad = 4,
  kProductGateUp = 8,  // a forward product, as in the recomputation
};

struct BackwardGemmParams {
  uint32_t products;  // BackwardProduct, or-ed
  DownGradMatrices down_grad;
  InputGradMatrices input_grad;
  WeightGradMatrices weight_grad;  // carry: of all experts
  GroupedGemmParams gate_up;       // its rows and waits are those of all products
  // This launch adds rows piece * piece_rows .. + piece_rows - 1 of every expert to its weight
  // gradient; what does not end the expert goes to the carry.
  int32_t piece, piece_rows;
};

// What a launch needs to know of a kernel.
struct BackwardGemmKernelInfo {
  const void* address;
  uint32_t threads;
  size_t shared_bytes;
};

// Production: DefaultSm90GemmConfig<kNatural>.
BackwardGemmKernelInfo BackwardGemmKernel();

}  // namespace mok::testing
