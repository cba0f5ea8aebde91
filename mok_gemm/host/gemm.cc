#include "mok_gemm/host/gemm.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <thread>
#include <tuple>
#include <vector>

#include "mok_core/bits.h"
#include "mok_gemm/host/kernels.h"
#include "mok_gemm/host/tile_product.h"

namespace mok {
namespace {

Status CheckMatrix(const char* name, const void* data, int64_t rows, int64_t columns,
                   int64_t stride) {
  if (rows == 0 || columns == 0) return OkStatus();
  if (data == nullptr) return InvalidArgumentError("Gemm: ", name, " is null");
  if (stride < columns) {
    return InvalidArgumentError("Gemm: stride of ", name, ": expected at least ", columns, ", got ",
                                stride);
  }
  return OkStatus();
}

Status CheckDType(const char* name, DType dtype) {
  if (dtype == DType::kBf16 || dtype == DType::kFp32) return OkStatus();
  return InvalidArgumentError("Gemm: ", name, ": expected bf16 or fp32, got ", DTypeName(dtype));
}

Status CheckProblem(const GemmProblem& problem) {
  if (problem.m < 0 || problem.n < 0 || problem.k < 0) {
    return InvalidArgumentError("Gemm: m, n, k: expected 0 or more, got ", problem.m, ", ",
                                problem.n, ", ", problem.k);
  }
  MOK_RETURN_IF_ERROR(CheckDType("in_dtype", problem.in_dtype));
  MOK_RETURN_IF_ERROR(CheckDType("out_dtype", problem.out_dtype));
  const bool a_is_km = problem.layout == GemmLayout::kTN;
  const bool b_is_nk = problem.layout == GemmLayout::kNT;
  if (!a_is_km && !b_is_nk && problem.layout != GemmLayout::kNN) {
    return InvalidArgumentError("Gemm: layout: expected 0 (NT), 1 (NN) or 2 (TN), got ",
                                static_cast<int32_t>(problem.layout));
  }
  const auto [m, n, k] = std::tuple(problem.m, problem.n, problem.k);
  MOK_RETURN_IF_ERROR(
      CheckMatrix("a", problem.a, a_is_km ? k : m, a_is_km ? m : k, problem.a_stride));
  MOK_RETURN_IF_ERROR(
      CheckMatrix("b", problem.b, b_is_nk ? n : k, b_is_nk ? k : n, problem.b_stride));
  return CheckMatrix("c", problem.c, m, n, problem.c_stride);
}

// How c is cut into tiles. The cut decides speed only, never bits.
struct Tiling {
  int64_t rows, columns;     // of a tile
  int64_t row_tiles, tiles;  // tiles in a column of tiles, and altogether

  // Full tiles, halved until every worker finds about two.
  Tiling(const GemmProblem& problem, int num_workers)
      : rows(problem.layout == GemmLayout::kNT ? TileProduct::kMaxNtRows : TileProduct::kMaxTile),
        columns(TileProduct::kMaxTile) {
    Count(problem);
    while (tiles < 2 * num_workers && (rows > 32 || columns > 32)) {
      (columns >= rows ? columns : rows) /= 2;
      Count(problem);
    }
  }

 private:
  void Count(const GemmProblem& problem) {
    row_tiles = CeilDiv(problem.m, rows);
    tiles = row_tiles * CeilDiv(problem.n, columns);
  }
};

}  // namespace

// One worker's scratch, made when it first meets a dtype.
class GemmWorker {
 public:
  // Computes the tile whose first element is (row, column).
  void Run(Isa isa, const GemmProblem& problem, const Tiling& tiling, int64_t tile);

 private:
  std::optional<TileProduct> products_[2];
};

void GemmWorker::Run(Isa isa, const GemmProblem& problem, const Tiling& tiling, int64_t tile) {
  std::optional<TileProduct>& slot = products_[problem.in_dtype == DType::kFp32 ? 1 : 0];
  if (!slot) slot.emplace(KernelsOf(isa, problem.in_dtype));
  // Row tiles inside: successive tiles share a part of b.
  const int64_t row = tile % tiling.row_tiles * tiling.rows;
  const int64_t column = tile / tiling.row_tiles * tiling.columns;
  const auto at = [](const void* data, int64_t offset, DType dtype) {
    return static_cast<const char*>(data) + offset * ElementBytes(dtype);
  };
  const bool a_is_km = problem.layout == GemmLayout::kTN;
  const bool b_is_nk = problem.layout == GemmLayout::kNT;
  const int64_t c_offset = row * problem.c_stride + column;
  const Destination destination = {
      .data = static_cast<char*>(problem.c) + c_offset * ElementBytes(problem.out_dtype),
      .stride = problem.c_stride,
      .dtype = problem.out_dtype};
  const TileProduct::Product product = {
      .a = {at(problem.a, a_is_km ? row : row * problem.a_stride, problem.in_dtype),
            problem.a_stride},
      .b = {at(problem.b, b_is_nk ? column * problem.b_stride : column, problem.in_dtype),
            problem.b_stride},
      .rows = static_cast<int>(std::min(tiling.rows, problem.m - row)),
      .columns = static_cast<int>(std::min(tiling.columns, problem.n - column)),
      .depth = problem.k,
      .destination = destination};
  if (product.depth == 0) {
    std::fill_n(slot->accumulators(), TileProduct::kMaxTile * TileProduct::kMaxTile, 0.0f);
    slot->kernels().store({.c = slot->accumulators(),
                           .c_stride = TileProduct::kMaxTile,
                           .rows = product.rows,
                           .columns = product.columns,
                           .destination = destination});
  } else if (b_is_nk) {
    slot->MultiplyNt(product);
  } else if (a_is_km) {
    slot->MultiplyTn(product);
  } else {
    slot->MultiplyNn(product);
  }
}

void RunOnThreads(int num_workers, const std::function<void(int worker)>& body) {
  std::vector<std::thread> threads;
  threads.reserve(num_workers - 1);
  for (int worker = 1; worker < num_workers; ++worker) threads.emplace_back(body, worker);
  body(0);
  for (std::thread& thread : threads) thread.join();
}

GemmRunner::GemmRunner(Isa isa, int max_workers) : isa_(isa), max_workers_(max_workers) {
  MOK_CHECK(IsaSupported(isa)) << "this machine cannot run " << IsaName(isa);
  MOK_CHECK(max_workers >= 1) << "max_workers: expected at least 1, got " << max_workers;
  workers_ = std::make_unique<GemmWorker[]>(max_workers);
}

GemmRunner::~GemmRunner() = default;

Status GemmRunner::Run(const GemmProblem& problem, const RunOnWorkers& run) {
  MOK_RETURN_IF_ERROR(CheckProblem(problem));
  if (problem.m == 0 || problem.n == 0) return OkStatus();
  const Tiling tiling(problem, max_workers_);
  std::atomic<int64_t> next_tile{0};
  const auto body = [&](int worker) {
    for (int64_t tile; (tile = next_tile.fetch_add(1, std::memory_order_relaxed)) < tiling.tiles;) {
      workers_[worker].Run(isa_, problem, tiling, tile);
    }
  };
  run(static_cast<int>(std::min<int64_t>(max_workers_, tiling.tiles)), body);
  return OkStatus();
}

Status Gemm(Isa isa, int num_workers, const GemmProblem& problem) {
  return GemmRunner(isa, num_workers).Run(problem);
}

}  // namespace mok
