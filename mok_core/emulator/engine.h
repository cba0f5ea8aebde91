// State of the emulator, shared by its implementation files. Not for users.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "mok_core/emulator/device_api.h"
#include "mok_core/emulator/emulator.h"
#include "mok_core/emulator/vector_clock.h"

namespace mok::emulator {

struct Block;
struct Cluster;
struct Fiber;
struct Grid;

constexpr size_t kStackBytes = 128 << 10;
// Each resident block's shared memory sits in a slot of this size; offsets are shared addresses.
constexpr size_t kSlotBytes = 1 << 20;
constexpr uint32_t kReservedShared = 1024;  // the system's part at the start of shared memory
constexpr uint32_t kOffsetMask = 0xFFFFFF;  // shared::cluster address: rank << 24 | offset
constexpr int kMaxAgents = 65535;

// ---- accesses and what is remembered of them (race.cc)

enum class AccessKind : uint8_t { kNone, kGeneric, kAsync, kAtomicGpu, kAtomicSystem };

struct Access {
  uint32_t clock = 0;
  uint16_t agent = 0;
  AccessKind kind = AccessKind::kNone;
  uint8_t bytes = 0;  // mask of the cell's four bytes
};

// History of four bytes of memory: the last write and some of the reads after it.
struct Cell {
  Access write;
  Access reads[3];
};

// Whoever performs accesses: a fiber, or one of the asynchronous units on its own clock.
struct Agent {
  enum class Kind : uint8_t { kFiber, kBarrier, kWgmma, kBulkRead, kBulkWrite, kTensorCore };
  Kind kind;
  Block* block;
  Grid* grid;
  const void* object;  // Fiber or Barrier
};

// A range of memory as the checks see it: shared memory of `block`, or global memory.
struct MemoryRange {
  Block* block;         // null: global
  uint32_t offset;      // shared offset
  const void* pointer;  // global address
  size_t bytes;
};

// ---- device memory (memory.cc)

struct Allocation {
  char* base;
  size_t bytes;
  std::string name;
  int device;  // -1: host
  bool live = true;
  std::vector<uint8_t> initialized;             // per 4-byte word, mask of bytes
  std::vector<std::unique_ptr<Cell[]>> shadow;  // pages of kShadowPage cells
};
constexpr size_t kShadowPage = 1024;

// ---- threads and blocks

struct Barrier {
  uint32_t offset = 0;
  Block* block = nullptr;
  uint32_t count = 0, pending = 0, phase = 0;
  int64_t transactions = 0;
  int transfers = 0;  // in flight
  int64_t transfer_bytes = 0;
  uint32_t last_transfer = 0;  // clock of the last phase with transfers
  uint16_t agent = 0;
  // Arrivals of the running phase, and what completed phases have published: to waits of CTA scope,
  // and to waits of cluster scope as well.
  Clock arriving, completed, arriving_remote, completed_remote;
  std::vector<Fiber*> waiters;
};

struct NamedBarrierState {
  int count = 0, arrived = 0;
  std::vector<Fiber*> waiters;
  Clock clock;
};

// A warp collective in progress.
struct Collective {
  const char* name = nullptr;
  uint32_t mask = 0, arrived = 0;
  uint64_t in[32] = {}, out[32] = {};
  std::vector<Fiber*> waiters;
  Clock clock;
};

struct WgmmaOperation {
  WgmmaOperands operands;
  int buffer;
  bool fresh;  // first of a chain on its accumulator
  int issued = 0;
  bool have_clock = false;
  Clock clock;
};

struct Warpgroup {
  std::vector<WgmmaOperation> operations;
  uint64_t executed = 0;
  std::vector<std::vector<float>> buffers;
  std::vector<int> references, free_buffers;
  uint16_t agent = 0;
  std::vector<Fiber*> waiters;
};

// A thread's accumulator while wgmma owns it.
struct InflightAccumulator {
  float* registers;
  int count, buffer;
  uint64_t last;
};

struct BulkOperation {
  bool read_done = false, write_done = false;
};
using BulkGroup = std::vector<std::shared_ptr<BulkOperation>>;

struct TensorLoadRequest {  // tcgen05.ld
  uint32_t address;
  uint32_t* registers;
  int columns;
};

// What a fiber is doing, for reports.
struct Operation {
  const char* name = "start";
  uint32_t argument = 0;
  uint64_t detail = 0;
  const void* pointer = nullptr;
};

enum class FiberState : uint8_t { kReady, kBlocked, kDone };

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  ThreadContext* context = nullptr;
  Block* block = nullptr;
  int thread = 0, warp = 0, lane = 0;
  FiberState state = FiberState::kReady;
  Operation operation;
  bool time_limited = false;  // blocked in a try_wait, which may give up
  uint16_t agent = 0;
  Clock clock;
  // Fence-based synchronisation (atomics.cc), by Scope.
  std::unique_ptr<Clock> fence_release[2], relaxed_seen[2];
  std::vector<uint64_t> wgmma_groups;
  uint64_t wgmma_issued = 0;
  std::vector<InflightAccumulator> wgmma_inflight;
  bool wgmma_fenced = false;
  std::vector<BulkGroup> bulk_groups;
  BulkGroup bulk_open;
  size_t bulk_complete[2] = {0, 0};  // leading groups known to have written, to have read
  int bulk_read_agent = -1, bulk_write_agent = -1;
  std::vector<TensorLoadRequest> tensor_loads;
  bool tensor_needs_fence = false;
  uint64_t tensor_last = 0;
  int registers = 0;
  uint32_t cluster_waits = 0;
};

struct Block {
  Grid* grid = nullptr;
  Cluster* cluster = nullptr;
  int slot = 0;
  Index3 index;
  uint32_t rank = 0;
  char* shared = nullptr;
  uint32_t shared_end = 0;  // offsets [kReservedShared, shared_end) are the kernel's
  int live = 0;
  std::vector<Fiber*> fibers;
  std::map<uint32_t, Barrier> barriers;
  std::map<uint32_t, std::string> names;
  NamedBarrierState named_barriers[16];
  std::vector<Collective> collectives;  // per warp
  std::vector<Warpgroup> warpgroups;
  std::vector<Cell> shadow;
  int free_registers = 0;
  std::vector<Fiber*> register_waiters;
  // Tensor memory: 128 lanes x 512 columns, allocated by columns.
  std::vector<uint32_t> tensor_memory;
  std::vector<int> tensor_owner, tensor_pending;
  std::vector<Cell> tensor_shadow;  // per lane quadrant and column
  int tensor_agent = -1;
  uint64_t tensor_sequence = 0;
  int tensor_allocations = 0;
  bool tensor_permit = true;
  std::vector<Fiber*> tensor_waiters;
};

struct Cluster {
  Grid* grid = nullptr;
  std::vector<Block*> blocks;
  int live = 0, arrived = 0, total = 0;
  uint32_t phase = 0;
  std::vector<Fiber*> waiters;
  Clock arriving, completed;
};

struct Grid {
  GridOptions options;
  void (*kernel)(const void*);
  const void* parameters;
  uint64_t next_cluster = 0, num_clusters = 0, finished_clusters = 0;
  int cluster_size = 1;
  Grid* predecessor = nullptr;  // in its stream
  int async_pending = 0;
  bool finished = false;
  Clock final_clock;
};

// An asynchronous operation in flight. fire() performs one effect; true: finished. Operations of
// one queue take effect in order; -1: unordered.
struct AsyncOperation {
  std::function<bool()> fire;
  int queue;
  Grid* grid;
};

// What released values of one variable carry (atomics.cc).
struct SyncChannel {
  Scope scope;
  int device;
  Clock clock;
};

struct Engine {
  Options options;
  Report report;
  std::vector<std::unique_ptr<Grid>> grids;
  std::vector<Fiber*> ready;
  size_t ready_head = 0;
  std::vector<std::unique_ptr<AsyncOperation>> async;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Cluster>> clusters;
  std::vector<Agent> agents;       // index = agent; fibers first
  uint32_t next_fiber_agent = 0;   // fibers take the first agents, in multiples of a chunk
  uint32_t first_async_chunk = 0;  // vector-clock chunk of the first asynchronous agent
  int live_fibers = 0;
  int resident[kMaxDevices] = {};
  uint64_t progress = 0;
  uint64_t random_state = 1;
  bool failed = false;
  // Shared-memory slots.
  char* slots = nullptr;
  int num_slots = 0;
  std::vector<int> free_slots;
  std::vector<Block*> slot_block;
  // Virtual time in nanoseconds.
  uint64_t time = 0;
  bool timer_read = false;
  uint64_t time_jump = 0, time_jumped = 0;
  std::unordered_map<const void*, std::vector<SyncChannel>> sync_variables;
};

extern Engine& g_engine;
extern Fiber* g_current;  // the running fiber; null in the scheduler and outside runs

// ---- fiber.cc
void SwitchToScheduler();                 // from a fiber
void SwitchToFiber(Fiber* fiber);         // from the scheduler
void RunOnScheduler(void (*function)());  // from the caller of Run(); returns when it ends or fails
[[noreturn]] void LeaveScheduler();       // after a failure, from anywhere inside a run
void PrepareFiber(Fiber* fiber, void (*entry)());
void ReleaseStack(Fiber* fiber);
bool StackIntact(const Fiber* fiber);

// ---- scheduler.cc
uint64_t Random();
double RandomUnit();
void MakeReady(Fiber* fiber);
void Wake(std::vector<Fiber*>& fibers);
void BlockFiber();
void YieldFiber();
// Every emulated instruction starts here: notes what the fiber does, and may switch.
void Enter(const char* name, uint32_t argument = 0, uint64_t detail = 0,
           const void* pointer = nullptr);
void AddAsync(std::function<bool()> fire, int queue = -1);
uint16_t NewAsyncAgent(Agent::Kind kind, Block* block, const void* object);

// ---- report.cc
std::string Format(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void Fail(const char* kind, const char* format, ...)
    __attribute__((format(printf, 2, 3)));
std::string DescribeFiber(const Fiber* fiber);
std::string DescribeShared(const Block* block, uint32_t offset);
std::string DescribeGlobal(const void* pointer);
std::string DescribeStall();

// ---- memory.cc
Block* BlockOfAddress(uint32_t address);
// The block that owns [address, address + bytes), checked against its shared memory.
Block* CheckShared(uint32_t address, size_t bytes, const char* what);
void CheckSharedOffset(const Block* block, uint32_t offset, size_t bytes, const char* what);
bool IsSharedPointer(const void* pointer);
bool IsGlobalPointer(const void* pointer);
// The live allocation that holds the range and that the running thread's device may access.
Allocation* CheckGlobal(const void* pointer, size_t bytes, const char* what);
void CheckInitialized(const Allocation* allocation, const void* pointer, size_t bytes,
                      const char* what);
void SetInitialized(Allocation* allocation, const void* pointer, size_t bytes);
Cell& GlobalCell(Allocation* allocation, size_t word);
void ResetGlobalShadow();
const void* StoreParameters(const void* parameters, size_t bytes);
void ResetParameters();
bool IsParameterPointer(const void* pointer);
int DeviceOfFiber(const Fiber* fiber);

// ---- race.cc
void RecordAccess(bool write, const MemoryRange& range, const Clock& clock, Access access,
                  const char* what);
void RecordCellAccess(bool write, Cell& cell, const MemoryRange& where, const Clock& clock,
                      Access access, const char* what);
[[noreturn]] void FailRace(const char* kind, const char* problem, const std::string& where,
                           const char* what, const Access& previous, bool previous_write);
Access FiberAccess(AccessKind kind);  // by the running fiber, now
void Tick(Fiber* fiber);
void ReleaseTo(Clock& clock);  // the running fiber publishes; both no-ops without race checks
void AcquireFrom(const Clock& clock);

// ---- sync.cc
void NoteSynchronized();  // tcgen05 needs a fence after this
Collective& RunCollective(const char* name, uint32_t mask, uint64_t in, bool memory,
                          void (*combine)(Collective&));

// ---- mbarrier.cc
Barrier& BarrierAt(uint32_t address, const char* what);
void TouchBarrier(Barrier& barrier, AccessKind kind);
void BeginTransfer(Barrier& barrier, uint32_t bytes);
void CompleteTransfer(Barrier& barrier, uint32_t bytes);
void CompletePhaseIfDone(Barrier& barrier);

// ---- blocks.cc
int AgentsPerBlock(const GridOptions& options);
void LaunchCluster(Grid* grid, uint64_t number);
void FinishBlock(Block* block);  // when its last thread has ended
void FinishGrid(Grid* grid);

// ---- copies.cc
void CheckFiberExit(Fiber* fiber);  // nothing it issued is left pending

}  // namespace mok::emulator
