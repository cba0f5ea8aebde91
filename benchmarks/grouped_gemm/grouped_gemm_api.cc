#include "benchmarks/grouped_gemm/grouped_gemm_api.h"

#include <memory>

#include "benchmarks/kernel_wait.h"
#include "mok_core/status.h"
#include "mok_gemm/sm90/grouped_gemm.h"

struct MokGroupedGemm {
  mok::GroupedGemmKernelInfo kernel;
  mok::GroupedGemmParams params;
  mok::GroupedGemmLaunch launch;
  mok::KernelWait wait;
};

namespace mok {
namespace {

GroupedGemmProblem ProblemOf(const MokGroupedGemmArgs& args) {
  GroupedGemmProblem problem;
  problem.epilogue = args.swiglu != 0 ? GemmEpilogue::kSwiGlu : GemmEpilogue::kStore;
  problem.a = static_cast<const BFloat16*>(args.a);
  problem.rows = args.rows;
  problem.k = args.k;
  problem.a_stride = args.k;
  problem.expert_begin = static_cast<const int32_t*>(args.expert_begin);
  problem.expert_count = static_cast<const int32_t*>(args.expert_count);
  problem.experts = args.experts;
  problem.weights = static_cast<const BFloat16*>(args.weights);
  problem.weights_up = static_cast<const BFloat16*>(args.weights_up);
  problem.width = args.width;
  problem.out = static_cast<BFloat16*>(args.out);
  problem.gate = static_cast<BFloat16*>(args.gate);
  problem.up = static_cast<BFloat16*>(args.up);
  problem.out_stride = args.width;
  problem.swiglu_limit = args.swiglu_limit;
  return problem;
}

StatusOr<std::unique_ptr<MokGroupedGemm>> Create(const MokGroupedGemmArgs& args) {
  const GroupedGemmProblem problem = ProblemOf(args);
  const auto order = static_cast<ColumnOrder>(args.column_order);
  auto plan = std::make_unique<MokGroupedGemm>();
  plan->kernel = GroupedGemmKernel(order, problem.epilogue);
  MOK_ASSIGN_OR_RETURN(plan->params, MakeGroupedGemmParams(problem, plan->kernel));
  if (args.max_panel_blocks > 0) plan->params.max_panel_blocks = args.max_panel_blocks;
  MOK_RETURN_IF_ERROR(plan->wait.Allocate(args.device, 0));
  plan->params.wait = plan->wait.params();
  plan->launch.device = args.device;
  plan->launch.num_blocks = static_cast<uint32_t>(args.num_blocks);
  return plan;
}

}  // namespace
}  // namespace mok

int32_t mok_grouped_gemm_create(const MokGroupedGemmArgs* args, MokGroupedGemm** plan) {
  auto created = mok::Create(*args);
  if (!created.ok()) return mok::Report(created.status());
  *plan = created->release();
  return 0;
}

int32_t mok_grouped_gemm_launch(MokGroupedGemm* plan, void* stream) {
  mok::GroupedGemmLaunch launch = plan->launch;
  launch.stream = stream;
  return mok::Report(mok::LaunchGroupedGemm(plan->kernel, plan->params, launch));
}

int32_t mok_grouped_gemm_check(MokGroupedGemm* plan) {
  const mok::DeviceWaitNames names = {mok::GroupedGemmRoleName, nullptr};
  return mok::Report(mok::CheckDeviceWaitRecord(plan->wait.record(), names));
}

void mok_grouped_gemm_destroy(MokGroupedGemm* plan) { delete plan; }

const char* mok_grouped_gemm_error(void) { return mok::LastError().c_str(); }
