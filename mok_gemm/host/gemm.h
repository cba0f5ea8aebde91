// Batch-invariant matrix products over whole matrices, on several host threads.
//
// Built on the same kernels as TileWorker, with the same numerics (see tile_worker.h): the bits of
// c(i, j) depend on row i of the left and column j of the right operand, K and the ISA; not on m,
// n, the number of workers or the rest of the matrices.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "mok_core/dtype.h"
#include "mok_core/status.h"
#include "mok_gemm/host/isa.h"

namespace mok {

// How the operands of c[m, n] are stored, row-major with the last index contiguous.
enum class GemmLayout : int32_t {
  kNT = 0,  // c = a b^T:  a [m, k], b [n, k]
  kNN = 1,  // c = a b:    a [m, k], b [k, n]
  kTN = 2,  // c = a^T b:  a [k, m], b [k, n]
};

// One product. Strides count elements from one stored row to the next.
struct GemmProblem {
  GemmLayout layout = GemmLayout::kNT;
  int64_t m = 0;  // >= 0
  int64_t n = 0;  // >= 0
  int64_t k = 0;  // >= 0; 0 writes zeros
  DType in_dtype = DType::kFp32;
  DType out_dtype = DType::kFp32;
  const void* a = nullptr;
  int64_t a_stride = 0;
  const void* b = nullptr;
  int64_t b_stride = 0;
  void* c = nullptr;  // [m, n], overwritten; must not overlap a or b
  int64_t c_stride = 0;
};

// Calls body(worker) once for every worker in [0, num_workers) and returns when all are done. Any
// degree of concurrency is fine, including one after the other on the calling thread.
using RunOnWorkers =
    std::function<void(int num_workers, const std::function<void(int worker)>& body)>;

// The RunOnWorkers that starts num_workers - 1 threads and runs worker 0 on the caller.
void RunOnThreads(int num_workers, const std::function<void(int worker)>& body);

class GemmWorker;

// Holds the packing scratch of up to `max_workers` workers between products. One Run at a time.
class GemmRunner {
 public:
  // `isa` must be supported, `max_workers` >= 1 (checked: a violation ends the process).
  GemmRunner(Isa isa, int max_workers);
  ~GemmRunner();

  // c = product. kInvalidArgument names the field, what was expected and what was given: negative
  // extents, strides shorter than a row, dtypes other than kBf16 and kFp32, null operands.
  Status Run(const GemmProblem& problem, const RunOnWorkers& run = RunOnThreads);

 private:
  Isa isa_;
  int max_workers_;
  std::unique_ptr<GemmWorker[]> workers_;
};

// A GemmRunner used once.
Status Gemm(Isa isa, int num_workers, const GemmProblem& problem);

}  // namespace mok
