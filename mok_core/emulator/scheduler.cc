// The run: launches clusters while processors are free, lets fibers and asynchronous operations
// take turns, and recognises the states in which nothing can happen any more.
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "mok_core/emulator/engine.h"

namespace mok::emulator {

Engine& EngineInstance() {
  static Engine* engine = new Engine;  // never destroyed: kernels' hooks may outlive main
  return *engine;
}
Engine& g_engine = EngineInstance();
Fiber* g_current = nullptr;

namespace {

constexpr int kWatchdogSeconds = 30;
constexpr uint64_t kFirstTimeJump = 1000;                   // nanoseconds
constexpr uint64_t kPatience = 100'000'000;                 // idle time that sleeping code may take
constexpr uint64_t kPatienceAhead = 1'000'000'000'000'000;  // with fast_forward

void LaunchWhatFits() {
  Engine& e = g_engine;
  for (const auto& grid : e.grids) {
    if (!grid->finished && grid->finished_clusters == grid->num_clusters &&
        grid->async_pending == 0) {
      FinishGrid(grid.get());
    }
    if (grid->predecessor != nullptr && !grid->predecessor->finished) continue;
    int& resident = e.resident[grid->options.device];
    while (grid->next_cluster < grid->num_clusters &&
           resident + grid->cluster_size <= e.options.processors_per_device) {
      LaunchCluster(grid.get(), grid->next_cluster++);
    }
  }
}

bool AllGridsFinished() {
  return std::all_of(g_engine.grids.begin(), g_engine.grids.end(),
                     [](const auto& grid) { return grid->finished; });
}

// One effect of one asynchronous operation. The operation stays in place while it fires, because
// the effect may fail and leave the scheduler.
void FireAsync() {
  Engine& e = g_engine;
  size_t chosen = e.options.seed != 0 ? Random() % e.async.size() : 0;
  if (e.async[chosen]->queue >= 0) {
    for (size_t j = 0; j < chosen; ++j) {
      if (e.async[j]->queue == e.async[chosen]->queue) {
        chosen = j;
        break;
      }
    }
  }
  ++e.report.async_steps;
  ++e.progress;
  AsyncOperation* operation = e.async[chosen].get();
  if (!operation->fire()) return;
  --operation->grid->async_pending;
  for (size_t j = 0; j < e.async.size(); ++j) {
    if (e.async[j].get() == operation) {
      e.async.erase(e.async.begin() + j);
      break;
    }
  }
}

void RunFiber() {
  Engine& e = g_engine;
  Fiber* fiber;
  if (e.options.seed != 0) {
    const size_t chosen = e.ready_head + Random() % (e.ready.size() - e.ready_head);
    fiber = e.ready[chosen];
    e.ready[chosen] = e.ready.back();
    e.ready.pop_back();
  } else {
    fiber = e.ready[e.ready_head++];
    if (e.ready_head > 65536) {
      e.ready.erase(e.ready.begin(), e.ready.begin() + static_cast<int64_t>(e.ready_head));
      e.ready_head = 0;
    }
  }
  SwitchToFiber(fiber);
  if (!StackIntact(fiber)) Fail("usage", "stack overflow in %s", DescribeFiber(fiber).c_str());
  if (fiber->state == FiberState::kDone && fiber->block->live == 0) FinishBlock(fiber->block);
}

// Nothing can happen at the present time. Code that watches the clock may be waiting for it to
// advance: let it. Otherwise, or when patience has run out, this is the end.
void HandleStall(const char* kind, const char* text) {
  Engine& e = g_engine;
  const uint64_t patience = e.options.fast_forward ? kPatienceAhead : kPatience;
  bool limited = false;
  for (const auto& fiber : e.fibers) {
    limited |= fiber->state == FiberState::kBlocked && fiber->time_limited;
  }
  // A try_wait gives up after a while even if nobody has looked at the clock yet.
  const bool first = e.time_jump == 0 && limited;
  if ((!e.timer_read && !first) || e.time_jumped > patience) {
    const std::string stall = text + DescribeStall();
    Fail(kind, "%s", stall.c_str());
  }
  e.time_jump = e.time_jump == 0 ? kFirstTimeJump : e.time_jump * 2;
  e.time += e.time_jump;
  e.time_jumped += e.time_jump;
  e.timer_read = false;
  for (const auto& fiber : e.fibers) {
    if (fiber->state != FiberState::kBlocked || !fiber->time_limited) continue;
    fiber->state = FiberState::kReady;  // not MakeReady: giving up is no progress
    e.ready.push_back(fiber.get());
  }
}

void Schedule() {
  Engine& e = g_engine;
  uint64_t last_progress = ~0ull, idle = 0;
  for (;;) {
    if (e.progress != last_progress) LaunchWhatFits();
    const size_t num_ready = e.ready.size() - e.ready_head;
    if (num_ready == 0 && e.async.empty()) {
      if (e.live_fibers == 0) {
        LaunchWhatFits();
        if (AllGridsFinished()) return;
        if (e.live_fibers != 0) continue;
        Fail("usage", "a cluster does not fit on its device");
      }
      HandleStall("deadlock", "no thread can run and no transfer is in flight:\n");
      continue;
    }
    ++e.report.steps;
    ++e.time;
    if (e.progress != last_progress) {
      last_progress = e.progress;
      idle = 0;
      e.time_jump = e.time_jumped = 0;
    }
    // With work in flight an idle stretch only means that the work should proceed.
    const bool stuck = ++idle > std::max<uint64_t>(e.async.empty() ? 4096 : 64, 64 * num_ready);
    if (stuck && e.async.empty()) {
      HandleStall("livelock", "every thread blocks or spins and nothing changes:\n");
      idle = 0;
      continue;
    }
    const bool fire =
        !e.async.empty() && (num_ready == 0 || stuck || RandomUnit() < e.options.async_probability);
    if (fire) {
      FireAsync();
    } else {
      RunFiber();
    }
  }
}

// A kernel that spins on plain memory never comes back to the scheduler.
void OnWatchdog(int) {
  static uint64_t last_steps = ~0ull;
  static const Fiber* last_fiber = nullptr;
  if (g_current != nullptr && g_current == last_fiber && g_engine.report.steps == last_steps) {
    char text[256];
    const int length = std::snprintf(
        text, sizeof text,
        "emulator: block %u warp %d lane %d has run %d s of processor time without "
        "reaching a wrapper (a plain spin loop?)\n",
        g_current->block->index.x, g_current->warp, g_current->lane, kWatchdogSeconds);
    (void)!write(2, text, static_cast<size_t>(length));
    _exit(3);
  }
  last_steps = g_engine.report.steps;
  last_fiber = g_current;
}

void SetWatchdog(int seconds) {
  std::signal(SIGVTALRM, seconds > 0 ? OnWatchdog : SIG_DFL);
  itimerval timer{{seconds, 0}, {seconds, 0}};
  setitimer(ITIMER_VIRTUAL, &timer, nullptr);
}

void ReserveSlots() {
  Engine& e = g_engine;
  uint64_t blocks = 0, agents = 0;
  for (const auto& grid : e.grids) {
    const uint64_t all = grid->num_clusters * grid->cluster_size;
    blocks += std::min<uint64_t>(all, e.options.processors_per_device);
    agents += all * AgentsPerBlock(grid->options);
  }
  if (e.options.check_races && agents > kMaxAgents - 4096) {
    std::fprintf(stderr, "emulator: %lu threads are too many for race checks\n",
                 static_cast<unsigned long>(agents));
    std::abort();
  }
  e.agents.assign(e.options.check_races ? agents : 0, Agent{});
  e.first_async_chunk = static_cast<uint32_t>(agents / VectorClock::kChunk);
  const int wanted = static_cast<int>(blocks);
  if (e.num_slots < wanted) {
    if (e.slots != nullptr) munmap(e.slots, e.num_slots * kSlotBytes);
    void* pages = mmap(nullptr, wanted * kSlotBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) std::abort();
    e.slots = static_cast<char*>(pages);
    e.num_slots = wanted;
  }
  e.free_slots.clear();
  for (int slot = e.num_slots - 1; slot >= 0; --slot) e.free_slots.push_back(slot);
  e.slot_block.assign(e.num_slots, nullptr);
}

void ResetRun() {
  Engine& e = g_engine;
  e.report = Report{};
  e.failed = false;
  e.ready.clear();
  e.ready_head = 0;
  e.next_fiber_agent = 0;
  e.live_fibers = 0;
  std::fill(std::begin(e.resident), std::end(e.resident), 0);
  e.timer_read = false;
  e.time_jump = e.time_jumped = 0;
  e.sync_variables.clear();
  ResetGlobalShadow();
  e.random_state = e.options.seed * 0x9E3779B97F4A7C15ull + 88172645463325252ull;
  for (int i = 0; i < 8; ++i) Random();
}

void ClearRun() {
  Engine& e = g_engine;
  for (const auto& fiber : e.fibers) ReleaseStack(fiber.get());
  e.async.clear();
  e.fibers.clear();
  e.blocks.clear();
  e.clusters.clear();
  e.grids.clear();
  ResetParameters();
}

}  // namespace

uint64_t Random() {
  uint64_t& x = g_engine.random_state;  // xorshift64
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return x;
}

double RandomUnit() { return static_cast<double>(Random() >> 11) * 0x1p-53; }

void MakeReady(Fiber* fiber) {
  fiber->state = FiberState::kReady;
  g_engine.ready.push_back(fiber);
  ++g_engine.progress;
}

void Wake(std::vector<Fiber*>& fibers) {
  for (Fiber* fiber : fibers) {
    if (fiber->state == FiberState::kBlocked) MakeReady(fiber);
  }
  fibers.clear();
}

void BlockFiber() {
  g_current->state = FiberState::kBlocked;
  SwitchToScheduler();
}

void YieldFiber() {
  g_engine.ready.push_back(g_current);
  SwitchToScheduler();
}

void Enter(const char* name, uint32_t argument, uint64_t detail, const void* pointer) {
  if (g_current == nullptr) {
    std::fprintf(stderr, "emulator: %s called outside a kernel\n", name);
    std::abort();
  }
  g_current->operation = {name, argument, detail, pointer};
  if (g_engine.options.seed != 0 && RandomUnit() < g_engine.options.preempt_probability) {
    YieldFiber();
  }
}

void AddAsync(std::function<bool()> fire, int queue) {
  Grid* grid = g_current->block->grid;
  ++grid->async_pending;
  g_engine.async.push_back(
      std::make_unique<AsyncOperation>(AsyncOperation{std::move(fire), queue, grid}));
}

uint16_t NewAsyncAgent(Agent::Kind kind, Block* block, const void* object) {
  if (g_engine.agents.size() >= kMaxAgents) Fail("usage", "too many agents for race checks");
  g_engine.agents.push_back({kind, block, block->grid, object});
  return static_cast<uint16_t>(g_engine.agents.size() - 1);
}

void Configure(const Options& options) { g_engine.options = options; }

const Options& CurrentOptions() { return g_engine.options; }

void QueueGrid(const GridOptions& options, void (*kernel)(const void*), const void* parameters,
               size_t parameter_bytes) {
  Engine& e = g_engine;
  auto grid = std::make_unique<Grid>();
  grid->options = options;
  grid->kernel = kernel;
  grid->parameters = StoreParameters(parameters, parameter_bytes);
  const Index3& cluster = options.cluster;
  grid->cluster_size = static_cast<int>(cluster.x * cluster.y * cluster.z);
  const uint64_t blocks = static_cast<uint64_t>(options.grid.x) * options.grid.y * options.grid.z;
  grid->num_clusters = blocks / grid->cluster_size;
  for (const auto& other : e.grids) {
    if (other->options.device == options.device && other->options.stream == options.stream) {
      grid->predecessor = other.get();
    }
  }
  e.grids.push_back(std::move(grid));
}

Report Run() {
  const auto start = std::chrono::steady_clock::now();
  Engine& e = g_engine;
  ResetRun();
  ReserveSlots();
  SetWatchdog(kWatchdogSeconds);
  RunOnScheduler(Schedule);
  SetWatchdog(0);
  g_current = nullptr;
  ClearRun();
  const auto elapsed = std::chrono::steady_clock::now() - start;
  e.report.seconds = std::chrono::duration<double>(elapsed).count();
  return e.report;
}

}  // namespace mok::emulator
