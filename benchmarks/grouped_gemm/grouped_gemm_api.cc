#include "benchmarks/grouped_gemm/grouped_gemm_api.h"

#include <memory>
#include <string>

#include "mok_core/device/runtime.h"
#include "mok_core/status.h"
#include "mok_gemm/sm90/grouped_gemm.h"

namespace mok {
namespace {

std::string& LastError() {
  static thread_local std::string text;
  return text;
}

int32_t Report(const Status& status) {
  if (!status.ok()) LastError() = status.ToString();
  return static_cast<int32_t>(status.code());
}

}  // namespace
}  // namespace mok

struct MokGroupedGemm {
  ~MokGroupedGemm() {
    for (void* const memory : {record, abort_flag}) {
      if (memory != nullptr) mok::Report(mok::runtime::Free(memory));
    }
  }

  mok::GroupedGemmKernelInfo kernel;
  mok::GroupedGemmParams params;
  mok::GroupedGemmLaunch launch;
  void* record = nullptr;      // DeviceWaitRecord in mapped host memory
  void* abort_flag = nullptr;  // in device memory
};

namespace mok {
namespace {

constexpr uint64_t kTimeoutNs = 1'000'000'000;

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
  MOK_ASSIGN_OR_RETURN(plan->record,
                       runtime::AllocateMappedHost(sizeof(DeviceWaitRecord), "wait_record"));
  MOK_ASSIGN_OR_RETURN(plan->abort_flag,
                       runtime::AllocateDevice(args.device, sizeof(uint32_t), "abort_flag"));
  MOK_RETURN_IF_ERROR(runtime::Fill(plan->abort_flag, 0, sizeof(uint32_t)));
  plan->params.wait = {static_cast<DeviceWaitRecord*>(plan->record),
                       static_cast<uint32_t*>(plan->abort_flag), kTimeoutNs, 0};
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
  const auto& record = *static_cast<const mok::DeviceWaitRecord*>(plan->record);
  return mok::Report(mok::CheckDeviceWaitRecord(record, {mok::GroupedGemmRoleName, nullptr}));
}

void mok_grouped_gemm_destroy(MokGroupedGemm* plan) { delete plan; }

const char* mok_grouped_gemm_error(void) { return mok::LastError().c_str(); }
