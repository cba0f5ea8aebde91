// Grouped GEMM on Hopper: host side. One launch multiplies the rows of every expert with that
// expert's weights; how many rows each expert has is read on the device.
#pragma once

#include <cstdint>

#include "mok_core/device/wait_record.h"
#include "mok_core/dtype.h"
#include "mok_core/status.h"
#include "mok_gemm/sm90/grouped_gemm_params.h"

namespace mok {

// C[r, :] = A[r, :] B_e^T for the rows r of each expert e, or the SwiGLU of two such products.
// bf16, fp32 accumulation with K ascending: the bits of an output element depend on its row of A,
// its column and K only. All pointers are device memory, 16-byte aligned.
struct GroupedGemmProblem {
  GemmEpilogue epilogue = GemmEpilogue::kStore;

  const BFloat16* a = nullptr;  // [rows, k]
  int64_t rows = 0;             // >= 1; of A and of the outputs
  int64_t k = 0;                // a multiple of 8
  int64_t a_stride = 0;         // a multiple of 8

  // Expert e has rows expert_begin[e] .. + expert_count[e] - 1 of A. Ranges do not overlap; other
  // rows may hold anything, NaN included, and their outputs are not written.
  const int32_t* expert_begin = nullptr;  // [experts]
  const int32_t* expert_count = nullptr;  // [experts]
  int64_t experts = 0;                    // >= 1

  const BFloat16* weights = nullptr;     // [experts, width, k]: B; kSwiGlu: Wg
  const BFloat16* weights_up = nullptr;  // [experts, width, k]: Wu; kSwiGlu only
  int64_t width = 0;                     // a multiple of 8

  BFloat16* out = nullptr;   // [rows, width]: C; kSwiGlu: h
  BFloat16* gate = nullptr;  // [rows, width]: g; kSwiGlu only
  BFloat16* up = nullptr;    // [rows, width]: u; kSwiGlu only
  int64_t out_stride = 0;    // a multiple of 8, of all outputs
  float swiglu_limit = 0;    // kSwiGlu: > 0; +infinity: no clamp
};

// Checks the problem (errors name the field, what was expected and what was given), whose epilogue
// has to be the kernel's, and builds the kernel's parameters; `wait` is the caller's to set.
StatusOr<GroupedGemmParams> MakeGroupedGemmParams(const GroupedGemmProblem& problem,
                                                  const GroupedGemmKernelInfo& kernel);

struct GroupedGemmLaunch {
  int device = 0;
  void* stream = nullptr;
  uint32_t num_blocks = 0;  // >= 1; one per SM
};

// Launches `kernel`. kInvalidArgument if `params` was made for another one, or if params.wait has
// not been set: record, abort_flag and timeout_ns.
Status LaunchGroupedGemm(const GroupedGemmKernelInfo& kernel, const GroupedGemmParams& params,
                         const GroupedGemmLaunch& launch);

}  // namespace mok
