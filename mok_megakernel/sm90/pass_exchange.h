// The exchange roles of both passes: a warp that pulls and one that pushes, and the meetings of the
// ranks.
#pragma once

#include "mok_comm/sm90/rank_meeting.h"
#include "mok_comm/sm90/row_mover.h"
#include "mok_core/device/device.h"
#include "mok_megakernel/sm90/pass_storage.h"
#include "mok_megakernel/sm90/seat_tasks.h"
#include "mok_schedule/program_cursor.h"
#include "mok_schedule/program_dependencies.h"

namespace mok {

// A warp's place among those that share a queue: tasks first, first + step, ... are its own. Static
// order: nobody hands out tasks, and consecutive rows are spread over all SMs.
struct ExchangeSeat {
  Direction direction;
  int32_t first, step;
  // Pull warps have nothing to do when the last rows leave, for which the pass waits: each shares
  // the last pushes of its block's push warp.
  bool shares_pushes;
  StagingChunks staging;
  uint64_t* pulling;  // see RowMover; null: several warps of a block pull
};

// half: see SeatTasks. The tail does not reach beyond the macrobatch that runs last: no pull waits
// for anything that waits for its pushes, so that pull warps may come when they can.
MOK_DEVICE SeatTasks TasksOfSeat(PassMode mode, const ProgramView& program, Queue queue,
                                 const ExchangeSeat& seat, int32_t half) {
  const int64_t count = mode == PassMode::kReduceOnly ? 0 : program.NumTasks(queue);
  int64_t most = 0;
  const bool has_pushes = count > 0 && program.num_macrobatches() > 0;
  if (queue == Queue::kPush && seat.shares_pushes && has_pushes) {
    // The last macrobatch is the smallest, whichever runs last.
    const RingPlan& ring = program.shape().ring;
    most =
        ring.blocks_in_macrobatch(program.num_macrobatches() - 1) * program.shape().exchange_tiles;
  }
  return {seat.first, seat.step, half, TailOfQueue(count, most, seat.step), count};
}

// The tasks of a seat in order. Decoding and dependencies take an SM a microsecond, so every lane
// prepares one task and all 32 are handed out one after the other.
template <class Config>
class ExchangeTasks {
 public:
  struct Item {
    ExchangeTile tile;
    TaskKind kind;
    int32_t index;  // in the queue
  };

  MOK_DEVICE ExchangeTasks(const ProgramView& program, Queue queue, const SeatTasks& tasks)
      : program_(&program),
        cursor_(program, queue),
        lane_(static_cast<int>(ThreadIndex().x) % 32),
        tasks_(tasks),
        next_(tasks.begin()) {}

  // All lanes; the item is the same in all.
  MOK_DEVICE bool Next(Item& item) {
    const int64_t index = tasks_.At(next_);
    if (index >= tasks_.count) return false;
    if (position_ == 0) Prepare();
    item.index = static_cast<int32_t>(index);
    item.kind = static_cast<TaskKind>(Shuffle(static_cast<int32_t>(own_.kind), position_));
    ExchangeTile& tile = item.tile;
    tile.table_row = Shuffle(own_.tile.table_row, position_);
    tile.local_row = Shuffle(own_.tile.local_row, position_);
    tile.rows = Shuffle(own_.tile.rows, position_);
    tile.num_waits = Shuffle(own_.tile.num_waits, position_);
    tile.num_signals = Shuffle(own_.tile.num_signals, position_);
    // With one macrobatch nothing in the ring is overwritten. (The mistake is one of the backward:
    // a forward's macrobatches come last to first, so that no token has come in before.)
    constexpr bool kCopies =
        Config::kBug == PassBug::kCopiesOverwritten && Config::kPass == Pass::kBackward;
    tile.may_copy = program_->num_macrobatches() == 1 || kCopies;
    MOK_UNROLL
    for (int i = 0; i < ExchangeTile::kMaxWaits; ++i) {
      tile.wait_counters[i] = Shuffle(own_.tile.wait_counters[i], position_);
      tile.wait_targets[i] = Shuffle(own_.tile.wait_targets[i], position_);
    }
    MOK_UNROLL
    for (int i = 0; i < ExchangeTile::kMaxSignals; ++i) {
      tile.signals[i] = Shuffle(own_.tile.signals[i], position_);
    }
    position_ = (position_ + 1) % 32;
    ++next_;
    return true;
  }

 private:
  // This lane's task of the next 32.
  MOK_DEVICE void Prepare() {
    own_ = {};
    const int64_t index = tasks_.At(next_ + lane_);
    if (index < tasks_.count) {
      const Task task = cursor_.Seek(index);
      own_.kind = task.kind;
      if (task.block >= 0) FillRows(task);
      FillCounters(DependenciesInPass<Config::kPass>(*program_, task));
      if (Drops(task.kind)) own_.tile.num_waits = 0;
    }
    SyncWarp();
  }

  MOK_DEVICE static bool Drops(TaskKind kind) {
    const bool is_exit = kind == TaskKind::kExitBarrier;
    return (Config::kBug == PassBug::kPushTooEarly && IsPush(kind) && !is_exit) ||
           (Config::kBug == PassBug::kExitBeforeSent && is_exit);
  }

  MOK_DEVICE void FillRows(const Task& task) {
    const ProgramShape& shape = program_->shape();
    const int32_t per_tile = shape.rows_per_exchange_tile(), first = task.tile * per_tile;
    const int32_t rest = program_->table().rows_in_block(task.block) - first;
    const auto slot = static_cast<int32_t>(program_->SlotOfBlock(task.block, task.macrobatch));
    own_.tile.table_row = task.block * kRowBlock + first;
    own_.tile.local_row = slot * kRowBlock + first;
    own_.tile.rows = rest < 0 ? 0 : rest < per_tile ? rest : per_tile;
  }

  MOK_DEVICE void FillCounters(const Dependencies& dependencies) {
    ExchangeTile& tile = own_.tile;
    tile.num_waits = dependencies.num_waits;
    tile.num_signals = dependencies.num_signals;
    if (Config::kBug == PassBug::kRingOverwrite && tile.num_waits > 1) tile.num_waits = 1;
    MOK_UNROLL
    for (int i = 0; i < ExchangeTile::kMaxWaits; ++i) {
      if (i >= dependencies.num_waits) continue;
      tile.wait_counters[i] = dependencies.waits[i].first_counter;
      tile.wait_targets[i] = dependencies.waits[i].target;
    }
    MOK_UNROLL
    for (int i = 0; i < ExchangeTile::kMaxSignals; ++i) {
      if (i < dependencies.num_signals) tile.signals[i] = dependencies.signals[i];
    }
  }

  const ProgramView* program_;
  ProgramCursor cursor_;  // of this lane
  int lane_;
  SeatTasks tasks_;
  int64_t next_;
  int position_ = 0;  // of the next task among the 32 prepared
  Item own_ = {};
};

// The number of the pass that runs, for the meetings.
template <class Params>
MOK_DEVICE uint64_t EpochOf(const Params& p) {
  return LoadRelaxedGpu(&p.signals.state->epoch) + 1;
}

// One warp of the grid, as its first step: tells the peers that this rank has entered the pass.
// What precedes the entry is complete when the kernel starts, so that it need not wait for the
// warps to find their tasks.
template <class Config, class Params>
MOK_DEVICE void TellEntry(const Params& p) {
  if (!MeetsPeers<Config>(p) || Config::kBug == PassBug::kEntryNotTold) return;
  TellRanks<Config::kExchangeBug>(p.exchange.meeting, Meeting::kEntry, EpochOf(p));
}

// Entry or exit barrier: waits for what precedes it on this GPU, meets the peers, tells this GPU.
template <class Config, class Params>
MOK_DEVICE bool RunBarrier(const Params& p, TaskKind kind, const ExchangeTile& tile,
                           DeviceWait& wait) {
  const bool leader = ThreadIndex().x % 32 == 0;
  uint64_t* counters = p.signals.counters;
  bool ready = true;
  for (int i = 0; leader && i < tile.num_waits && ready; ++i) {
    ready = wait.ForCounterGpu(counters + tile.wait_counters[i], tile.wait_targets[i]);
  }
  if (Shuffle(ready ? 1 : 0, 0) == 0) return false;
  const bool is_entry = kind == TaskKind::kEntryBarrier;
  if (MeetsPeers<Config>(p)) {
    DeviceWait meeting_wait(p.signals.meeting_wait, static_cast<int32_t>(PassRole::kMeeting));
    const Meeting meeting = is_entry ? Meeting::kEntry : Meeting::kExit;
    const uint64_t epoch = EpochOf(p);
    if (!is_entry) TellRanks<Config::kExchangeBug>(p.exchange.meeting, meeting, epoch);
    if (!AwaitRanks<Config::kExchangeBug>(p.exchange.meeting, meeting, epoch,
                                          static_cast<int32_t>(kind), meeting_wait)) {
      return false;
    }
  }
  if (is_entry && Config::kBug == PassBug::kNoEntrySignal) return true;
  if (leader) ReduceAddReleaseGpu(counters + tile.signals[0], uint64_t{1});
  return true;
}

// One warp: brings rows in (kPull) or sends them out (kPush), or one after the other.
// MoveRows(p, direction, kind, tile, mover, wait) of the pass knows the buffers. `time`: when the
// trace of the warp begins.
template <class Config, class Params>
MOK_DEVICE void ExchangeRole(const Params& p, PassStorage<Config>& s, const ExchangeSeat& seat,
                             uint64_t time) {
  RowMover<Config::kExchangeBug> mover(seat.direction, p.signals.counters, seat.staging,
                                       seat.pulling);
  PassTracer<Config> tracer(p.trace);
  const bool traces = ThreadIndex().x % 32 == 0;
  bool running = true;
  const bool turns = seat.direction == Direction::kPull && seat.shares_pushes &&
                     Config::kBug != PassBug::kTailNotShared;
  MOK_NO_UNROLL
  for (int half = 0; half <= (turns ? 1 : 0) && running; ++half) {
    const Direction direction = half == 0 ? seat.direction : Direction::kPush;
    const bool is_pull = direction == Direction::kPull;
    const Queue queue = is_pull ? Queue::kPull : Queue::kPush;
    mover.Turn(direction);
    DeviceWait wait = WaitOf(p, is_pull ? PassRole::kPull : PassRole::kPush);
    ExchangeTasks<Config> tasks(s.program, queue,
                                TasksOfSeat(p.shape.mode, s.program, queue, seat, half));
    typename ExchangeTasks<Config>::Item item = {};
    const auto record = [&](TracePhase phase) {
      if (Config::kTraces && traces)
        time = tracer.Record(static_cast<int32_t>(item.kind), phase, item.index, time);
    };
    while (running && tasks.Next(item)) {
      wait.SetTask(static_cast<int32_t>(item.kind), item.index);
      const bool is_barrier =
          item.kind == TaskKind::kEntryBarrier || item.kind == TaskKind::kExitBarrier;
      if (is_barrier) {
        mover.Flush();  // the exit waits for this warp's own rows as well
        record(TracePhase::kWork);
        running = RunBarrier<Config>(p, item.kind, item.tile, wait);
        record(TracePhase::kWait);
      } else {
        running = mover.Await(item.tile, wait);
        record(TracePhase::kWait);
        if (running) MoveRows(p, direction, item.kind, item.tile, mover, wait);
        record(TracePhase::kWork);
      }
    }
    mover.Flush();
  }
}

}  // namespace mok
