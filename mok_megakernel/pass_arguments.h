// Checks of the arguments of forward and backward that one rank can make alone. Whether ranks agree
// is the handshake's business.
#pragma once

#include "mok_core/status.h"
#include "mok_megakernel/mok.h"
#include "mok_megakernel/schedule.h"
#include "mok_megakernel/workspace_layout.h"

namespace mok {

// Errors name the argument, what was expected and what was given. A pointer may be null where its
// tensor is empty (no tokens, no local expert, no row in the ring).
Status CheckForwardArgs(const WorkspaceShape& shape, const Schedule& schedule,
                        const MokForwardArgs* args);
Status CheckBackwardArgs(const WorkspaceShape& shape, const Schedule& schedule,
                         const MokBackwardArgs* args);

}  // namespace mok
