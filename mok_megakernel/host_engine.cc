#include "mok_megakernel/host_engine.h"

#include <new>

#include "mok_core/argument_checks.h"
#include "mok_megakernel/engine_config.h"
#include "mok_megakernel/pass_arguments.h"
#include "mok_megakernel/pass_builder.h"
#include "mok_megakernel/pass_executor.h"

namespace mok {
namespace {

Status CheckSchedule(const Workspace& workspace, const Schedule* schedule) {
  MOK_RETURN_IF_ERROR(CheckPointer("schedule", schedule));
  const WorkspaceShape& shape = workspace.shape();
  const RoutingTable& table = schedule->table;
  if (table.rank != shape.rank || table.ep_size != shape.ep_size || table.topk != shape.topk) {
    return FailedPreconditionError("schedule: built for rank ", table.rank, " of ", table.ep_size,
                                   " with K = ", table.topk, ", the workspace is of rank ",
                                   shape.rank, " of ", shape.ep_size, " with K = ", shape.topk);
  }
  if (schedule->num_tokens > shape.max_tokens) {
    return FailedPreconditionError("schedule: has ", schedule->num_tokens,
                                   " tokens, the workspace room for ", shape.max_tokens);
  }
  return OkStatus();
}

Status RunPrepared(Workspace& workspace, const EngineConfig& config, const PreparedPass& pass) {
  if (config.trace != nullptr) config.trace->rank = workspace.shape().rank;
  PassExecutor executor(workspace, config, pass);
  const Status status = executor.Run();
  if (!status.ok() && !executor.rejected()) workspace.Break(status);
  return status;
}

// `check` and `prepare` are the pass's own. Whatever fails before the pass runs meets the other
// ranks as an error.
template <class Args, class Check, class Prepare>
Status RunPass(Operation operation, Workspace& workspace, const MokEngineConfig* config,
               const Schedule* schedule, const Args* args, Check check, Prepare prepare) {
  EngineConfig resolved;
  PreparedPass pass;
  const auto ready = [&]() -> Status {
    MOK_ASSIGN_OR_RETURN(resolved, ResolveConfig(config, workspace.shape().ep_size));
    MOK_RETURN_IF_ERROR(CheckSchedule(workspace, schedule));
    MOK_RETURN_IF_ERROR(check(workspace.shape(), *schedule, args));
    MOK_RETURN_IF_ERROR(workspace.ReserveWorkers(resolved.crew.size(), resolved.isa));
    return prepare(workspace, resolved, *schedule, *args, &pass);
  };
  Status prepared;
  try {
    prepared = ready();
  } catch (const std::bad_alloc&) {  // peers are told this too, before they wait in vain
    prepared = ResourceExhaustedError("out of memory while preparing the pass");
  }
  if (!prepared.ok()) return workspace.MeetWithError(operation, prepared);
  return RunPrepared(workspace, resolved, pass);
}

}  // namespace

Status RunForward(Workspace& workspace, const MokEngineConfig* config, const Schedule* schedule,
                  const MokForwardArgs* args) {
  return RunPass(Operation::kForward, workspace, config, schedule, args, CheckForwardArgs,
                 PrepareForward);
}

Status RunBackward(Workspace& workspace, const MokEngineConfig* config, const Schedule* schedule,
                   const MokBackwardArgs* args) {
  return RunPass(Operation::kBackward, workspace, config, schedule, args, CheckBackwardArgs,
                 PrepareBackward);
}

}  // namespace mok
