// Parameters of the grouped-GEMM kernel, shared by host and device code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mok_core/device/types.h"
#include "mok_core/device/wait_record.h"
#include "mok_core/dtype.h"
#include "mok_gemm/sm90/gemm_config.h"

namespace mok {

enum class GemmEpilogue : int32_t {
  kStore,   // C = A B^T
  kSwiGlu,  // g = A Wg^T, u = A Wu^T, h = silu(g) * u
};

struct GroupedGemmParams {
  // Which rows of A, and of the outputs, belong to each expert.
  struct Rows {
    const int32_t* begin;  // [num_experts], device memory
    const int32_t* count;  // [num_experts], >= 0, device memory: read by the kernel only
    int32_t num_experts;
  } rows;
  struct Operands {
    TensorMap a;     // [rows, K]
    TensorMap b[2];  // [num_experts, width, K]; kSwiGlu: Wg and Wu; kStore: the same map twice
    int32_t width;   // N for kStore, I for kSwiGlu
    int32_t k_blocks;
  } operands;
  struct Outputs {
    BFloat16* out;   // [rows, width]: C, or h
    BFloat16* gate;  // [rows, width], kSwiGlu
    BFloat16* up;    // [rows, width], kSwiGlu
    int64_t stride;  // elements, of all of them
    float swiglu_limit;
  } outputs;
  TensorMap c;               // kStore: of outputs.out, for tensor stores
  int32_t max_panel_blocks;  // see TileRaster
  DeviceWaitParams wait;     // roles: GroupedGemmRole; task: the tile index
  const void* kernel;        // that they were made for; for the launch
};

enum class GroupedGemmRole : int32_t { kScheduler, kProducer, kConsumer };
const char* GroupedGemmRoleName(int32_t role);

// What a launch needs to know of a kernel, and how it loads weights and stores.
struct GroupedGemmKernelInfo {
  const void* address;
  uint32_t threads;
  size_t shared_bytes;
  ColumnOrder order;
  GemmEpilogue epilogue;
  int half_columns;  // Config::kHalfN
};

// The production kernels (DefaultSm90GemmConfig).
GroupedGemmKernelInfo GroupedGemmKernel(ColumnOrder order, GemmEpilogue epilogue);

}  // namespace mok
