// Birth and end of clusters, blocks and their threads.
#include <cstdlib>
#include <cstring>
#include <utility>

#include "mok_core/emulator/engine.h"

namespace mok::emulator {
namespace {

void FiberMain() {
  Fiber* fiber = g_current;
  Grid* grid = fiber->block->grid;
  grid->kernel(grid->parameters);
  CheckFiberExit(fiber);
  fiber->state = FiberState::kDone;
  --g_engine.live_fibers;
  ++g_engine.progress;
  --fiber->block->live;
  SwitchToScheduler();
  std::abort();  // a finished fiber is never resumed
}

int ThreadsPerBlock(const GridOptions& options) {
  return static_cast<int>(options.block.x * options.block.y * options.block.z);
}

void StartFiber(Block* block, int thread) {
  Engine& e = g_engine;
  const GridOptions& options = block->grid->options;
  auto fiber = std::make_unique<Fiber>();
  fiber->block = block;
  fiber->thread = thread;
  fiber->warp = thread / 32;
  fiber->lane = thread % 32;
  fiber->registers = options.registers_per_thread;
  PrepareFiber(fiber.get(), FiberMain);
  const uint32_t t = thread;
  const Index3 index{t % options.block.x, t / options.block.x % options.block.y,
                     t / options.block.x / options.block.y};
  *fiber->context = ThreadContext{index,
                                  block->index,
                                  options.block,
                                  options.grid,
                                  block->rank,
                                  static_cast<uint32_t>(block->grid->cluster_size),
                                  static_cast<uint32_t>(block->slot)};
  if (e.options.check_races) {
    fiber->agent = static_cast<uint16_t>(e.next_fiber_agent + thread);
    e.agents[fiber->agent] = {Agent::Kind::kFiber, block, block->grid, fiber.get()};
    if (block->grid->predecessor != nullptr) {
      fiber->clock.Join(block->grid->predecessor->final_clock);
    }
    fiber->clock.happened.Raise(fiber->agent, 1);
  }
  block->fibers.push_back(fiber.get());
  e.ready.push_back(fiber.get());
  ++e.live_fibers;
  ++block->live;
  e.fibers.push_back(std::move(fiber));
}

std::unique_ptr<Block> MakeBlock(Grid* grid, Cluster* cluster, const Index3& first, uint32_t rank) {
  Engine& e = g_engine;
  const GridOptions& options = grid->options;
  auto block = std::make_unique<Block>();
  block->grid = grid;
  block->cluster = cluster;
  block->rank = rank;
  const Index3 offset{rank % options.cluster.x, rank / options.cluster.x % options.cluster.y,
                      rank / options.cluster.x / options.cluster.y};
  block->index = {first.x + offset.x, first.y + offset.y, first.z + offset.z};
  block->slot = e.free_slots.back();
  e.free_slots.pop_back();
  e.slot_block[block->slot] = block.get();
  block->shared = e.slots + block->slot * kSlotBytes;
  block->shared_end = static_cast<uint32_t>(kReservedShared + options.shared_bytes);
  std::memset(block->shared, 0xFF, block->shared_end);  // NaN in bf16 and fp32
  const int threads = ThreadsPerBlock(options);
  block->collectives.resize((threads + 31) / 32);
  block->warpgroups.resize((threads + 127) / 128);
  block->free_registers = 65536 - options.registers_per_thread * threads;
  if (block->free_registers < 0) {
    Fail("usage", "%s: %d threads of %d registers exceed the register file", options.name, threads,
         options.registers_per_thread);
  }
  if (e.options.check_races) {
    block->shadow.resize(block->shared_end / 4 + 4);
    for (Warpgroup& warpgroup : block->warpgroups) {
      warpgroup.agent = NewAsyncAgent(Agent::Kind::kWgmma, block.get(), &warpgroup);
    }
  }
  return block;
}

// Every access of a peer to this block's shared memory must be ordered before the block's exit.
void CheckPeersDone(const Block* block, const Clock& exit) {
  for (uint32_t word = 0; word < block->shadow.size(); ++word) {
    const Cell& cell = block->shadow[word];
    auto late = [&](const Access& a) {
      return a.kind != AccessKind::kNone && a.clock > exit.happened[a.agent];
    };
    if (late(cell.write)) {
      FailRace("race", "block exits", DescribeShared(block, word * 4), "exit", cell.write, true);
    }
    for (const Access& read : cell.reads) {
      if (late(read)) {
        FailRace("race", "block exits", DescribeShared(block, word * 4), "exit", read, false);
      }
    }
  }
}

// Some thread has waited for every phase that transfers belong to: otherwise they might still be
// under way.
void CheckTransfersAwaited(const Block* block, const Clock& exit) {
  for (const auto& [offset, barrier] : block->barriers) {
    if (exit.happened[barrier.agent] >= barrier.last_transfer) continue;
    Fail("tx", "block exits with transfers to mbarrier %s phase %u in flight: no thread waited",
         DescribeShared(block, offset).c_str(), barrier.last_transfer - 1);
  }
}

}  // namespace

int AgentsPerBlock(const GridOptions& options) {
  const int chunk = VectorClock::kChunk;
  return (ThreadsPerBlock(options) + chunk - 1) / chunk * chunk;
}

void LaunchCluster(Grid* grid, uint64_t number) {
  Engine& e = g_engine;
  const GridOptions& options = grid->options;
  auto cluster = std::make_unique<Cluster>();
  cluster->grid = grid;
  const Index3 clusters{options.grid.x / options.cluster.x, options.grid.y / options.cluster.y,
                        options.grid.z / options.cluster.z};
  const auto i = static_cast<uint32_t>(number);
  const Index3 first{i % clusters.x * options.cluster.x,
                     i / clusters.x % clusters.y * options.cluster.y,
                     i / clusters.x / clusters.y * options.cluster.z};
  const int threads = ThreadsPerBlock(options);
  for (int rank = 0; rank < grid->cluster_size; ++rank) {
    std::unique_ptr<Block> block = MakeBlock(grid, cluster.get(), first, rank);
    for (int thread = 0; thread < threads; ++thread) StartFiber(block.get(), thread);
    e.next_fiber_agent += AgentsPerBlock(options);
    cluster->blocks.push_back(block.get());
    cluster->total += threads;
    ++e.resident[options.device];
    e.blocks.push_back(std::move(block));
  }
  cluster->live = grid->cluster_size;
  e.clusters.push_back(std::move(cluster));
  ++e.progress;
}

void FinishBlock(Block* block) {
  Engine& e = g_engine;
  for (const auto& [offset, barrier] : block->barriers) {
    const std::string name = DescribeShared(block, offset);
    if (barrier.transfers != 0) {
      Fail("tx", "block exits with %d transfers (%ld bytes) still in flight to mbarrier %s",
           barrier.transfers, static_cast<long>(barrier.transfer_bytes), name.c_str());
    }
    if (barrier.transactions != 0) {
      Fail("tx", "block exits with mbarrier %s transaction count %ld (phase %u)", name.c_str(),
           static_cast<long>(barrier.transactions), barrier.phase);
    }
  }
  if (e.options.check_races) {
    Clock exit;
    for (const Fiber* fiber : block->fibers) exit.Join(fiber->clock);
    CheckTransfersAwaited(block, exit);
    if (block->cluster->blocks.size() > 1) CheckPeersDone(block, exit);
  }
  if (block->tensor_allocations != 0) Fail("usage", "block exits without tcgen05.dealloc");
  for (Fiber* fiber : block->fibers) {
    block->grid->final_clock.Join(fiber->clock);
    ReleaseStack(fiber);
    fiber->clock = Clock{};
  }
  if (--block->cluster->live > 0) return;
  for (Block* member : block->cluster->blocks) {
    e.free_slots.push_back(member->slot);
    --e.resident[block->grid->options.device];
  }
  ++block->grid->finished_clusters;
}

// The end of a grid orders everything it did, in every proxy, before the next grid of its stream.
void FinishGrid(Grid* grid) {
  Engine& e = g_engine;
  grid->finished = true;
  ++e.progress;
  if (!e.options.check_races) return;
  for (size_t agent = 0; agent < e.agents.size(); ++agent) {
    if (e.agents[agent].grid == grid) grid->final_clock.happened.Raise(agent, 0xFFFFFFFFu);
  }
  grid->final_clock.async_global = grid->final_clock.happened;
  grid->final_clock.tensor = grid->final_clock.happened;
}

}  // namespace mok::emulator
