#include "mok_megakernel/cuda/matmul.h"

#include "mok_core/argument_checks.h"
#include "mok_core/bits.h"
#include "mok_core/device/runtime.h"
#include "mok_megakernel/layer_checks.h"

namespace mok {
namespace {

constexpr int64_t kMaxGridRows = 65535;  // of tiles: CUDA's limit in y

}  // namespace

Status CudaMatmul(const MokMatmulArgs* args, int device, void* stream) {
  MOK_RETURN_IF_ERROR(CheckMatmulArgs(args));
  MOK_RETURN_IF_ERROR(CheckRange("m", args->m, 0, kMaxGridRows * kMatmulTile));
  MOK_RETURN_IF_ERROR(CheckRange("device", device, 0, INT32_MAX));
  if (args->m == 0 || args->n == 0) return OkStatus();
  MatmulParams params = {args->a, args->b, args->c, args->m, args->n, args->k, 0, 0, 0, 0};
  params.a_row = args->layout == MOK_MATMUL_TN ? 1 : args->k;
  params.a_column = args->layout == MOK_MATMUL_TN ? args->m : 1;
  params.b_row = args->layout == MOK_MATMUL_NT ? 1 : args->n;
  params.b_column = args->layout == MOK_MATMUL_NT ? args->k : 1;
  runtime::LaunchConfig config;
  config.grid.x = static_cast<uint32_t>(CeilDiv<int64_t>(args->n, kMatmulTile));
  config.grid.y = static_cast<uint32_t>(CeilDiv<int64_t>(args->m, kMatmulTile));
  config.block.x = kMatmulThreads;
  config.shared_bytes = static_cast<size_t>(MatmulSharedBytes());
  config.registers_per_thread = 96;
  config.device = device;
  config.stream = stream;
  config.name = "mok_matmul";
  return runtime::LaunchKernelAddress(MatmulKernelAddress(), config, &params, sizeof params);
}

}  // namespace mok
