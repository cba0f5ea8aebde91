#include "mok_megakernel/engine_config.h"

#include <sched.h>

#include <algorithm>
#include <thread>

#include "mok_core/argument_checks.h"
#include "mok_megakernel/api_error.h"

namespace mok {
namespace {

StatusOr<Isa> ResolveIsa(int32_t isa) {
  if (isa == -1) return BestIsa();
  MOK_RETURN_IF_ERROR(CheckRange("config.isa", isa, -1, MOK_NUM_ISAS - 1));
  const Isa chosen = static_cast<Isa>(isa);
  if (!IsaSupported(chosen)) {
    return UnavailableError("config.isa: this machine has no ", IsaName(chosen), ", its best is ",
                            IsaName(BestIsa()));
  }
  return chosen;
}

}  // namespace

int NumCores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0) return std::max(1, CPU_COUNT(&cores));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

StatusOr<EngineConfig> ResolveConfig(const MokEngineConfig* config, int ep_size) {
  MOK_RETURN_IF_ERROR(CheckPointer("config", config));
  MOK_RETURN_IF_ERROR(
      CheckStructSize("MokEngineConfig", config->struct_size, sizeof(MokEngineConfig)));
  MOK_RETURN_IF_ERROR(CheckReserved("MokEngineConfig", config->reserved));
  MOK_RETURN_IF_ERROR(CheckRange("config.num_threads", config->num_threads, 0, MOK_MAX_THREADS));
  MOK_RETURN_IF_ERROR(
      CheckRange("config.num_comm_threads", config->num_comm_threads, 0, MOK_MAX_THREADS));
  MOK_RETURN_IF_ERROR(CheckRange("config.minibatch_rows", config->minibatch_rows, 0, INT32_MAX));
  MOK_RETURN_IF_ERROR(CheckRange("config.macrobatch_rows", config->macrobatch_rows, -1, INT32_MAX));
  EngineConfig resolved;
  MOK_ASSIGN_OR_RETURN(resolved.isa, ResolveIsa(config->isa));
  resolved.crew.compute =
      config->num_threads > 0 ? config->num_threads : std::max(1, NumCores() / ep_size);
  resolved.crew.communication = config->num_comm_threads;
  resolved.minibatch_rows = config->minibatch_rows;
  resolved.macrobatch_rows = config->macrobatch_rows;
  resolved.trace = config->trace;
  if (resolved.trace != nullptr && resolved.trace->recorder.num_workers() < resolved.crew.size()) {
    return InvalidArgumentError("config.trace: made for ", resolved.trace->recorder.num_workers(),
                                " workers, the pass has ", resolved.crew.size());
  }
  return resolved;
}

}  // namespace mok
