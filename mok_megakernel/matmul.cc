#include "mok_megakernel/matmul.h"

#include <unistd.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include "mok_core/argument_checks.h"
#include "mok_gemm/host/gemm.h"
#include "mok_gemm/host/isa.h"
#include "mok_megakernel/engine_config.h"
#include "mok_megakernel/layer_checks.h"
#include "mok_megakernel/worker_pool.h"

namespace mok {
namespace {

// Below this a second thread costs more than it saves.
constexpr double kFlopsPerThread = 4e6;

// Threads and packing scratch that stay between calls.
struct SharedWorkers {
  WorkerPool pool;
  std::unique_ptr<GemmRunner> runner;
  Isa isa = Isa::kPortable;
  int max_workers = 0;
};

// Of this process: the threads of a parent do not exist in a forked child, so the parent's object
// is left behind there.
SharedWorkers& WorkersOfThisProcess() {
  static SharedWorkers* workers = nullptr;
  static pid_t owner = 0;
  if (workers == nullptr || owner != getpid()) {
    workers = new SharedWorkers();  // lives as long as the process
    owner = getpid();
  }
  return *workers;
}

GemmProblem ProblemOf(const MokMatmulArgs& args) {
  GemmProblem problem;
  problem.layout = static_cast<GemmLayout>(args.layout);
  problem.m = args.m;
  problem.n = args.n;
  problem.k = args.k;
  problem.a = args.a;
  problem.b = args.b;
  problem.c = args.c;
  problem.a_stride = problem.layout == GemmLayout::kTN ? args.m : args.k;
  problem.b_stride = problem.layout == GemmLayout::kNT ? args.k : args.n;
  problem.c_stride = args.n;
  return problem;
}

int NumWorkers(const MokMatmulArgs& args, int allowed) {
  const double flops =
      2.0 * static_cast<double>(args.m) * static_cast<double>(args.n) * static_cast<double>(args.k);
  return std::max(1, static_cast<int>(std::min<double>(allowed, flops / kFlopsPerThread)));
}

}  // namespace

Status Matmul(const MokMatmulArgs* args) {
  MOK_RETURN_IF_ERROR(CheckMatmulArgs(args));
  MOK_RETURN_IF_ERROR(CheckRange("num_threads", args->num_threads, 0, MOK_MAX_THREADS));
  MOK_RETURN_IF_ERROR(CheckRange("isa", args->isa, -1, MOK_NUM_ISAS - 1));
  MokEngineConfig config{};
  config.struct_size = sizeof(config);
  config.num_threads = args->num_threads;
  config.isa = args->isa;
  MOK_ASSIGN_OR_RETURN(const EngineConfig resolved, ResolveConfig(&config, 1));
  const GemmProblem problem = ProblemOf(*args);
  const int num_workers = NumWorkers(*args, resolved.crew.compute);

  static std::mutex mutex;
  const std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
  if (!lock.owns_lock()) return Gemm(resolved.isa, 1, problem);
  SharedWorkers& workers = WorkersOfThisProcess();
  MOK_RETURN_IF_ERROR(workers.pool.Reserve(num_workers));
  if (workers.runner == nullptr || workers.isa != resolved.isa ||
      workers.max_workers < num_workers) {
    workers.runner = std::make_unique<GemmRunner>(resolved.isa, num_workers);
    workers.isa = resolved.isa;
    workers.max_workers = num_workers;
  }
  return workers.runner->Run(problem, [&](int count, const std::function<void(int)>& body) {
    workers.pool.Run(count, WorkerPool::Latecomers::kAwait, body);
  });
}

}  // namespace mok
