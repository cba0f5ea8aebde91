// The state of a TicketWorkSource, as host code sees it.
#pragma once

#include <cstdint>

namespace mok {

// In device memory, zero before the first launch; every launch leaves it zero, so that a captured
// graph can be replayed.
struct TicketCounter {
  uint64_t next;             // the next task's index
  uint64_t finished_blocks;  // blocks that have called Finish
};

}  // namespace mok
