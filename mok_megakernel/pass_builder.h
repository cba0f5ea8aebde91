// From the arguments of a call to the parameters and the task program of its pass.
#pragma once

#include <optional>

#include "mok_core/counter.h"
#include "mok_core/status.h"
#include "mok_megakernel/engine_config.h"
#include "mok_megakernel/mok.h"
#include "mok_megakernel/pass_params.h"
#include "mok_megakernel/schedule.h"
#include "mok_megakernel/workspace.h"
#include "mok_schedule/task_program.h"

namespace mok {

// A pass that is ready to run, and stays where it is.
struct PreparedPass {
  PassParams params;
  std::optional<TaskProgram> program;
  Counter* counters = nullptr;  // [program->NumCounters()], zero
  HandshakeRecord record;
};

// Under workspace.lock(). The arguments have been checked; they, the schedule and the workspace
// outlive the pass. Grows the scratch memory. kResourceExhausted when that is not possible.
Status PrepareForward(Workspace& workspace, const EngineConfig& config, const Schedule& schedule,
                      const MokForwardArgs& args, PreparedPass* pass);
Status PrepareBackward(Workspace& workspace, const EngineConfig& config, const Schedule& schedule,
                       const MokBackwardArgs& args, PreparedPass* pass);

}  // namespace mok
