// MokEngineConfig, checked and with its defaults filled in.
#pragma once

#include <cstdint>

#include "mok_core/status.h"
#include "mok_core/trace.h"
#include "mok_gemm/host/isa.h"
#include "mok_megakernel/mok.h"

// The opaque type of the C API.
struct MokTrace {
  MokTrace(int num_workers, int64_t events_per_worker) : recorder(num_workers, events_per_worker) {}

  mok::TraceRecorder recorder;
  int rank = 0;  // of the workspace that recorded last
};

namespace mok {

// Who runs the tasks of a pass.
struct Crew {
  int compute = 1;        // >= 1
  int communication = 0;  // 0: the compute workers take the merged order

  int size() const { return compute + communication; }
};

struct EngineConfig {
  Crew crew;
  Isa isa = Isa::kPortable;
  int64_t minibatch_rows = 0;   // 0: heuristic
  int64_t macrobatch_rows = 0;  // 0: heuristic, -1: all rows
  MokTrace* trace = nullptr;
};

// Cores that this process may run on, at least 1.
int NumCores();

// Errors name the field, what was expected and what was given.
StatusOr<EngineConfig> ResolveConfig(const MokEngineConfig* config, int ep_size);

}  // namespace mok
