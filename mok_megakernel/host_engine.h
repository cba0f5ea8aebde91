// The two passes of the layer on the host: check, prepare, meet the other ranks, run.
#pragma once

#include "mok_core/status.h"
#include "mok_megakernel/mok.h"
#include "mok_megakernel/schedule.h"
#include "mok_megakernel/workspace.h"

namespace mok {

// Collective, under workspace.lock(): the whole of mok_forward and mok_backward. An error that this
// rank finds in its own arguments is shown to all ranks. An error after the handshake breaks the
// workspace.
Status RunForward(Workspace& workspace, const MokEngineConfig* config, const Schedule* schedule,
                  const MokForwardArgs* args);
Status RunBackward(Workspace& workspace, const MokEngineConfig* config, const Schedule* schedule,
                   const MokBackwardArgs* args);

}  // namespace mok
