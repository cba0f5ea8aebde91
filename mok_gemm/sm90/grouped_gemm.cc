#include "mok_gemm/sm90/grouped_gemm.h"

#include "mok_core/argument_checks.h"
#include "mok_core/bits.h"
#include "mok_core/device/runtime.h"
#include "mok_gemm/sm90/tensor_maps.h"
#include "mok_gemm/sm90/tile_raster.h"

namespace mok {
namespace {

constexpr int64_t kAlignment = 16;  // bytes: of tensor maps and vectors
constexpr int kTileK = DefaultSm90GemmConfig<ColumnOrder::kNatural>::kTileK;

Status CheckOutputs(const GroupedGemmProblem& problem) {
  MOK_RETURN_IF_ERROR(CheckAligned("out", problem.out, kAlignment));
  if (problem.out_stride < problem.width || problem.out_stride % 8 != 0) {
    return InvalidArgumentError("out_stride = ", problem.out_stride,
                                ": expected a multiple of 8, at least width = ", problem.width);
  }
  if (problem.epilogue != GemmEpilogue::kSwiGlu) return OkStatus();
  MOK_RETURN_IF_ERROR(CheckAligned("gate", problem.gate, kAlignment));
  MOK_RETURN_IF_ERROR(CheckAligned("up", problem.up, kAlignment));
  if (!(problem.swiglu_limit > 0)) {
    return InvalidArgumentError("swiglu_limit = ", problem.swiglu_limit,
                                ": expected a positive number or infinity");
  }
  return OkStatus();
}

StatusOr<TensorMap> WeightMap(const GroupedGemmProblem& problem, const char* name,
                              const BFloat16* base, const GroupedGemmKernelInfo& kernel) {
  MOK_RETURN_IF_ERROR(CheckAligned(name, base, kAlignment));
  const WeightMatrix matrix{base, problem.experts, problem.width, problem.k};
  MOK_ASSIGN_OR_RETURN(const auto spec, WeightMapSpec(matrix, kernel.order, kernel.half_columns));
  return runtime::EncodeTensorMap(spec);
}

}  // namespace

const char* GroupedGemmRoleName(int32_t role) {
  switch (static_cast<GroupedGemmRole>(role)) {
    case GroupedGemmRole::kScheduler:
      return "scheduler";
    case GroupedGemmRole::kProducer:
      return "producer";
    case GroupedGemmRole::kConsumer:
      return "consumer";
  }
  return "unknown";
}

StatusOr<GroupedGemmParams> MakeGroupedGemmParams(const GroupedGemmProblem& problem,
                                                  const GroupedGemmKernelInfo& kernel) {
  if (problem.epilogue != kernel.epilogue) {
    return InvalidArgumentError("epilogue = ", static_cast<int>(problem.epilogue),
                                ": expected the kernel's, ", static_cast<int>(kernel.epilogue));
  }
  const bool swiglu = problem.epilogue == GemmEpilogue::kSwiGlu;
  MOK_RETURN_IF_ERROR(CheckAligned("a", problem.a, kAlignment));
  MOK_ASSIGN_OR_RETURN(const auto a_spec,
                       ActivationMapSpec(problem.a, problem.rows, problem.k, problem.a_stride));
  MOK_RETURN_IF_ERROR(CheckOutputs(problem));
  if (problem.expert_begin == nullptr || problem.expert_count == nullptr) {
    return InvalidArgumentError("expert_begin and expert_count: expected device addresses");
  }
  GroupedGemmParams params{};
  params.rows = {problem.expert_begin, problem.expert_count, static_cast<int32_t>(problem.experts)};
  MOK_ASSIGN_OR_RETURN(params.operands.a, runtime::EncodeTensorMap(a_spec));
  MOK_ASSIGN_OR_RETURN(params.operands.b[0],
                       WeightMap(problem, "weights", problem.weights, kernel));
  params.operands.b[1] = params.operands.b[0];
  if (swiglu) {
    MOK_ASSIGN_OR_RETURN(params.operands.b[1],
                         WeightMap(problem, "weights_up", problem.weights_up, kernel));
  }
  params.operands.width = static_cast<int32_t>(problem.width);
  params.operands.k_blocks = static_cast<int32_t>(CeilDiv(problem.k, int64_t{kTileK}));
  params.outputs = {problem.out, problem.gate, problem.up, problem.out_stride,
                    problem.swiglu_limit};
  if (!swiglu) {
    MOK_ASSIGN_OR_RETURN(const auto c_spec, ActivationMapSpec(problem.out, problem.rows,
                                                              problem.width, problem.out_stride));
    MOK_ASSIGN_OR_RETURN(params.c, runtime::EncodeTensorMap(c_spec));
  }
  params.max_panel_blocks = TileRaster::kDefaultPanelBlocks;
  params.kernel = kernel.address;
  return params;
}

Status LaunchGroupedGemm(const GroupedGemmKernelInfo& kernel, const GroupedGemmParams& params,
                         const GroupedGemmLaunch& launch) {
  if (launch.num_blocks < 1) {
    return InvalidArgumentError("num_blocks = ", launch.num_blocks, ": expected at least 1");
  }
  if (params.kernel != kernel.address) {
    return InvalidArgumentError("params: expected those made for the kernel, got another's");
  }
  const DeviceWaitParams& wait = params.wait;
  if (wait.record == nullptr || wait.abort_flag == nullptr || wait.timeout_ns == 0) {
    return InvalidArgumentError("params.wait: expected a record, an abort flag and a timeout, got ",
                                wait.record, ", ", wait.abort_flag, " and ", wait.timeout_ns,
                                " ns");
  }
  runtime::LaunchConfig config;
  config.grid = {launch.num_blocks, 1, 1};
  config.block = {kernel.threads, 1, 1};
  config.shared_bytes = kernel.shared_bytes;
  config.registers_per_thread = kSm90LaunchRegisters;
  config.device = launch.device;
  config.stream = launch.stream;
  config.name = "grouped_gemm";
  return runtime::LaunchKernelAddress(kernel.address, config, &params, sizeof params);
}

}  // namespace mok
