// Runs kernels on the host, with checks. One process, one OS thread: each emulated thread is a
// fiber, and a seeded scheduler chooses which runs and when asynchronous work takes effect.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "mok_core/device/types.h"

namespace mok::emulator {

// How to run. Not thread-safe; set between runs.
struct Options {
  // 0: round robin, asynchronous work in issue order. Else: random interleaving from this seed.
  uint64_t seed = 0;
  // Random mode: chance to switch to another thread at each emulated instruction.
  double preempt_probability = 0.05;
  // Chance per scheduler step that one pending asynchronous operation takes effect.
  double async_probability = 0.10;
  // Happens-before, proxy, scope and initialisation checks. Off: about 5 times as fast.
  bool check_races = true;
  // Blocks resident at once on each device (one per SM).
  int processors_per_device = 132;
  // What the devices say of themselves; every instruction runs on all.
  int compute_major = 9, compute_minor = 0;
  // A state in which nothing can happen is an error ("deadlock") unless this is set: then virtual
  // time runs ahead, so that bounded waits of the kernel expire as they would on a GPU. Unset, it
  // runs ahead by at most 0.1 s, for code that only sleeps: give waits longer timeouts than that.
  bool fast_forward = false;
  // Adds source positions to reports (runs addr2line; takes a second).
  bool symbolize = true;
};

// The outcome of a run. `kind` is one of: deadlock, livelock, race, proxy-fence, scope, tc-fence,
// tx (transaction counts), oob, uninit, peer, descriptor, usage, trap.
struct Report {
  bool ok = true;
  std::string kind, text;
  uint64_t steps = 0;        // scheduler steps
  uint64_t async_steps = 0;  // effects of asynchronous operations
  uint64_t multiply_accumulates = 0;
  uint64_t tensor_bytes = 0;  // moved by tensor loads
  uint64_t plain_accesses = 0;
  double seconds = 0;
};

struct GridOptions {
  Index3 grid, block, cluster;
  size_t shared_bytes = 0;
  int registers_per_thread = 168;
  int device = 0;
  // Grids of one stream of one device run one after the other; others run concurrently.
  int64_t stream = 0;
  const char* name = "kernel";
};

constexpr int kMaxDevices = 8;
constexpr size_t kMaxSharedBytes = 232448;  // per block, of sm_90 and sm_100

void Configure(const Options& options);
const Options& CurrentOptions();

// Queues a grid of `kernel(parameters)`; the parameters are copied to the constant bank.
void QueueGrid(const GridOptions& options, void (*kernel)(const void*), const void* parameters,
               size_t parameter_bytes);

// Runs every queued grid to the end or to the first error.
Report Run();

// Memory of a device (or of the host, mapped into every device). Poisoned with 0xFF, which is NaN
// in bf16 and fp32, fenced by unmapped-for-kernels red zones, and tracked for initialisation.
void* AllocateDevice(int device, size_t bytes, const std::string& name);
void* AllocateHost(size_t bytes, const std::string& name);
// Later accesses by kernels are errors. False: not the start of a live allocation.
bool Free(void* pointer);
void FreeAll();
// The host has written these bytes.
void MarkInitialized(const void* pointer, size_t bytes);
// Kernels on `device` may access memory of `peer` from now on.
void EnablePeerAccess(int device, int peer);

// Tests plant a bug with it: the map's swizzle disagrees with what the kernel expects.
void ForceTensorMapSwizzle(void* map, Swizzle swizzle);

}  // namespace mok::emulator
