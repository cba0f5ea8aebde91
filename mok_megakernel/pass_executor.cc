#include "mok_megakernel/pass_executor.h"

#include <algorithm>
#include <cstring>

#include "mok_core/bits.h"
#include "mok_megakernel/task_roles.h"

namespace mok {
namespace {

// Large enough to hide the cost of taking a chunk, small enough to share out the copy of a tensor.
constexpr size_t kStagingChunkBytes = 256 * 1024;

// A rank's own tasks hang only through a bug. Peers are given up on first, with the better text.
constexpr std::chrono::seconds kLeastLocalTimeout{60};

int64_t ChunksOf(const StagedCopy& copy) {
  return static_cast<int64_t>(CeilDiv(copy.bytes, kStagingChunkBytes));
}

int64_t NumStagedChunks(const PassParams& params) {
  int64_t chunks = 0;
  for (int i = 0; i < params.num_staged; ++i) chunks += ChunksOf(params.staged[i]);
  return chunks;
}

// Weight gradients may add to memory of the caller, which a rejected call must leave alone, and
// some of them wait for nothing else.
bool WritesCallerGradients(TaskKind kind) {
  return kind == TaskKind::kWeightGradDown || kind == TaskKind::kWeightGradGateUp ||
         kind == TaskKind::kSharedWeightGradDown || kind == TaskKind::kSharedWeightGradGateUp;
}

bool AllAtLeast(const Counter* counters, int count, uint64_t target) {
  for (int i = 0; i < count; ++i) {
    if (Read(counters[i]) < target) return false;
  }
  return true;
}

}  // namespace

PassExecutor::PassExecutor(Workspace& workspace, const EngineConfig& config,
                           const PreparedPass& pass)
    : workspace_(workspace),
      config_(config),
      pass_(pass),
      program_(*pass.program),
      num_staged_chunks_(NumStagedChunks(pass.params)),
      staging_(num_staged_chunks_),
      first_queue_(
          program_.NumTasks(config.crew.communication > 0 ? Queue::kCompute : Queue::kMerged)),
      second_queue_(program_.NumTasks(Queue::kCommunication)),
      progress_(static_cast<size_t>(config.crew.size())) {}

Status PassExecutor::Run() {
  // Workers of one merged queue are interchangeable, those of two queues are not.
  const auto latecomers = config_.crew.communication > 0 ? WorkerPool::Latecomers::kAwait
                                                         : WorkerPool::Latecomers::kSkip;
  workspace_.pool().Run(config_.crew.size(), latecomers, [this](int worker) { RunWorker(worker); });
  const std::lock_guard<std::mutex> lock(error_mutex_);
  return error_;
}

void PassExecutor::RunWorker(int worker) {
  StageInputs();
  const bool communicates = worker >= config_.crew.compute;
  ThreadWorkSource& source = communicates ? second_queue_ : first_queue_;
  Queue queue = Queue::kMerged;
  if (config_.crew.communication > 0)
    queue = communicates ? Queue::kCommunication : Queue::kCompute;
  int64_t index;
  while (!cancelled_.load(std::memory_order_relaxed) && source.Next(index)) {
    const Status status = RunTask(worker, program_.Decode(queue, index), index);
    if (!status.ok()) {
      Cancel(status);
      return;
    }
  }
}

// Copies what peers will read into the heap, and clears what is to be clear, chunk by chunk, by all
// workers.
void PassExecutor::StageInputs() {
  int64_t chunk;
  while (staging_.Next(chunk)) {
    int64_t first = 0;
    const StagedCopy* copy = pass_.params.staged;
    while (chunk - first >= ChunksOf(*copy)) first += ChunksOf(*copy++);
    const size_t begin = static_cast<size_t>(chunk - first) * kStagingChunkBytes;
    const size_t bytes = std::min(kStagingChunkBytes, copy->bytes - begin);
    if (copy->source == nullptr) {
      std::memset(copy->destination + begin, 0, bytes);
    } else {
      std::memcpy(copy->destination + begin, copy->source + begin, bytes);
    }
    Signal(staged_chunks_);
  }
}

Status PassExecutor::RunTask(int worker, const Task& task, int64_t index) {
  const Dependencies dependencies = program_.DependenciesOf(task);
  MOK_RETURN_IF_ERROR(AwaitDependencies(dependencies, task, index));
  {
    const ScopedTrace trace(config_.trace == nullptr ? nullptr : &config_.trace->recorder, worker,
                            static_cast<int32_t>(task.kind), index);
    MOK_RETURN_IF_ERROR(RunRole(worker, task, index));
  }
  for (int i = 0; i < dependencies.num_signals; ++i) {
    Signal(pass_.counters[dependencies.signals[i]]);
  }
  std::atomic<uint64_t>& finished = progress_[static_cast<size_t>(worker)].finished_tasks;
  finished.store(finished.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  return OkStatus();
}

Status PassExecutor::RunRole(int worker, const Task& task, int64_t index) {
  const PassParams& params = pass_.params;
  TileWorker& tiles = workspace_.tile_worker(worker);
  const bool forward = program_.shape().pass == Pass::kForward;
  switch (task.kind) {
    case TaskKind::kEntryBarrier:
      return RunEntryBarrier(index);
    case TaskKind::kExitBarrier:
      return RunExitBarrier(index);
    case TaskKind::kGateUp:
      RunGateUp(params, params.forward.activation, task, tiles);
      break;
    case TaskKind::kDown:
      RunDown(params, task, tiles);
      break;
    case TaskKind::kSharedGateUp:
      RunSharedGateUp(params, params.forward.shared_activation, task, tiles);
      break;
    case TaskKind::kSharedDown:
      RunSharedDown(params, task, tiles);
      break;
    case TaskKind::kTokenReduce:
      forward ? RunForwardReduce(params, task) : RunBackwardReduce(params, task);
      break;
    case TaskKind::kRecomputeGateUp:
      RunGateUp(params, params.backward.weighted_h, task, tiles);
      break;
    case TaskKind::kDownGrad:
      RunDownGrad(params, task, tiles);
      break;
    case TaskKind::kInputGrad:
      RunInputGrad(params, task, tiles);
      break;
    case TaskKind::kWeightGradDown:
      RunWeightGradDown(params, program_.PieceOf(task), task, tiles);
      break;
    case TaskKind::kWeightGradGateUp:
      RunWeightGradGateUp(params, program_.PieceOf(task), task, tiles);
      break;
    case TaskKind::kSharedRecomputeGateUp:
      RunSharedGateUp(params, params.backward.shared_weighted_h, task, tiles);
      break;
    case TaskKind::kSharedDownGrad:
      RunSharedDownGrad(params, task, tiles);
      break;
    case TaskKind::kSharedInputGrad:
      RunSharedInputGrad(params, task, tiles);
      break;
    case TaskKind::kSharedWeightGradDown:
      RunSharedWeightGradDown(params, task, tiles);
      break;
    case TaskKind::kSharedWeightGradGateUp:
      RunSharedWeightGradGateUp(params, task, tiles);
      break;
    default:
      RunExchange(task);
      break;
  }
  return OkStatus();
}

void PassExecutor::RunExchange(const Task& task) {
  switch (task.kind) {
    case TaskKind::kDispatch:
    case TaskKind::kRecomputeDispatch:
      RunDispatch(pass_.params, task);
      break;
    case TaskKind::kCombine:
      RunCombine(pass_.params, task);
      break;
    case TaskKind::kReverseCombine:
      RunReverseCombine(pass_.params, task);
      break;
    case TaskKind::kReverseDispatch:
      RunReverseDispatch(pass_.params, task);
      break;
    default:
      MOK_CHECK(false) << "no role for task " << TaskKindName(task.kind);
  }
}

// The handshake is the entry barrier: after it every rank's inputs are in place, nobody reads the
// last pass's buffers any more, and all ranks have agreed to run.
Status PassExecutor::RunEntryBarrier(int64_t index) {
  const Task task{TaskKind::kEntryBarrier, -1, 0, -1, -1};
  MOK_RETURN_IF_ERROR(
      AwaitCounters(&staged_chunks_, 1, static_cast<uint64_t>(num_staged_chunks_), task, index));
  const WaitContext context = ContextOf(TaskKindName(task.kind), index, workspace_.timeout());
  Status verdict;
  MOK_RETURN_IF_ERROR(workspace_.handshake().Run(pass_.record, {}, context, &verdict));
  rejected_ = !verdict.ok();  // read once all workers have left
  return verdict;
}

Status PassExecutor::RunExitBarrier(int64_t index) {
  return workspace_.handshake().ExitBarrier(
      ContextOf(TaskKindName(TaskKind::kExitBarrier), index, workspace_.timeout()));
}

Status PassExecutor::AwaitDependencies(const Dependencies& dependencies, const Task& task,
                                       int64_t index) {
  for (int i = 0; i < dependencies.num_waits; ++i) {
    const Wait& wait = dependencies.waits[i];
    MOK_RETURN_IF_ERROR(AwaitCounters(pass_.counters + wait.first_counter, wait.num_counters,
                                      wait.target, task, index));
  }
  if (!WritesCallerGradients(task.kind)) return OkStatus();
  const int32_t entry = program_.view().CounterOf(CounterFamily::kEntry, 0);
  return AwaitCounters(pass_.counters + entry, 1, 1, task, index);
}

Status PassExecutor::AwaitCounters(const Counter* counters, int count, uint64_t target,
                                   const Task& task, int64_t index) {
  if (AllAtLeast(counters, count, target)) return OkStatus();
  const std::chrono::nanoseconds allowed =
      std::max<std::chrono::nanoseconds>(2 * workspace_.timeout(), kLeastLocalTimeout);
  while (true) {
    const uint64_t finished_before = FinishedTasks();
    const Status waited =
        WaitAllAtLeast(counters, count, target, ContextOf(TaskKindName(task.kind), index, allowed));
    if (waited.code() != StatusCode::kDeadlineExceeded || FinishedTasks() == finished_before) {
      return waited;
    }
  }
}

WaitContext PassExecutor::ContextOf(const char* task, int64_t index,
                                    std::chrono::nanoseconds allowed) const {
  WaitContext context;
  context.rank = workspace_.shape().rank;
  context.task = task;
  context.task_index = index;
  context.deadline = std::chrono::steady_clock::now() + allowed;
  context.cancelled = &cancelled_;
  return context;
}

uint64_t PassExecutor::FinishedTasks() const {
  uint64_t sum = 0;
  for (const WorkerProgress& progress : progress_) {
    sum += progress.finished_tasks.load(std::memory_order_relaxed);
  }
  return sum;
}

void PassExecutor::Cancel(const Status& error) {
  const std::lock_guard<std::mutex> lock(error_mutex_);
  if (error_.ok()) error_ = error;
  cancelled_.store(true, std::memory_order_release);
}

}  // namespace mok
