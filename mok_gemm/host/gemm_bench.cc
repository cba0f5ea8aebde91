// Times the matrix products and the MoE tiles of one instruction set.
//
//   gemm_bench [isa] [bf16|fp32] [workers] [repeats]
//
// Products: best and median GFLOP/s of whole matrices. Tiles: of one worker on a full tile, with
// the epilogue.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "mok_core/dtype.h"
#include "mok_gemm/host/gemm.h"
#include "mok_gemm/host/tile_worker.h"

namespace mok {
namespace {

struct Options {
  Isa isa;
  DType dtype;
  int workers;
  int repeats;
};

// A matrix of normal values.
class Matrix {
 public:
  Matrix(DType dtype, int64_t rows, int64_t columns)
      : stride_(columns), bytes_(rows * columns * ElementBytes(dtype)) {
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < rows * columns; ++i) {
      const float value = normal(generator);
      if (dtype == DType::kBf16) {
        reinterpret_cast<BFloat16*>(bytes_.data())[i] = RoundToBFloat16(value);
      } else {
        reinterpret_cast<float*>(bytes_.data())[i] = value;
      }
    }
  }
  void* data() { return bytes_.data(); }
  int64_t stride() const { return stride_; }

 private:
  int64_t stride_;
  std::vector<char> bytes_;
};

// Runs `work` repeatedly and prints one line.
void Report(const Options& options, const std::string& name, double flops,
            const std::function<void()>& work) {
  work();
  std::vector<double> seconds;
  for (int i = 0; i < options.repeats; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  std::sort(seconds.begin(), seconds.end());
  std::printf("%-28s best %7.1f   median %7.1f GFLOP/s\n", name.c_str(), flops / seconds[0] / 1e9,
              flops / seconds[seconds.size() / 2] / 1e9);
}

void BenchProducts(const Options& options) {
  struct Size {
    int64_t m, n, k;
  };
  GemmRunner runner(options.isa, options.workers);
  for (const Size& size : {Size{128, 2048, 7168}, Size{128, 7168, 2048}, Size{256, 2048, 2048},
                           Size{256, 512, 4096}, Size{1024, 1024, 1024}, Size{128, 512, 512}}) {
    for (const GemmLayout layout : {GemmLayout::kNT, GemmLayout::kNN, GemmLayout::kTN}) {
      const bool a_is_km = layout == GemmLayout::kTN, b_is_nk = layout == GemmLayout::kNT;
      Matrix a(options.dtype, a_is_km ? size.k : size.m, a_is_km ? size.m : size.k);
      Matrix b(options.dtype, b_is_nk ? size.n : size.k, b_is_nk ? size.k : size.n);
      Matrix c(options.dtype, size.m, size.n);
      const GemmProblem problem = {.layout = layout,
                                   .m = size.m,
                                   .n = size.n,
                                   .k = size.k,
                                   .in_dtype = options.dtype,
                                   .out_dtype = options.dtype,
                                   .a = a.data(),
                                   .a_stride = a.stride(),
                                   .b = b.data(),
                                   .b_stride = b.stride(),
                                   .c = c.data(),
                                   .c_stride = c.stride()};
      const char* names[] = {"NT", "NN", "TN"};
      Report(options,
             StrCat(names[static_cast<int>(layout)], " ", size.m, " x ", size.n, " x ", size.k),
             2.0 * size.m * size.n * size.k, [&] {
               const Status status = runner.Run(problem);
               MOK_CHECK(status.ok()) << status;
             });
    }
  }
}

// One tile of each kind for hidden size 4096 and intermediate size 2048, 128 rows.
void BenchTiles(const Options& options) {
  constexpr int64_t kH = 4096, kI = 2048, kRows = kHostTileRows;
  constexpr float kNoLimit = std::numeric_limits<float>::infinity();
  TileWorker worker(options.isa, options.dtype);
  Matrix x(options.dtype, kRows, kH), y(options.dtype, kRows, kH);
  Matrix gate(options.dtype, kRows, kI), up(options.dtype, kRows, kI), h(options.dtype, kRows, kI),
      d_gate(options.dtype, kRows, kI), d_up(options.dtype, kRows, kI);
  Matrix w_gate(options.dtype, kI, kH), w_up(options.dtype, kI, kH), w_down(options.dtype, kH, kI);
  std::vector<float> weight(kRows, 0.5f), partial(kRows);
  Report(options, "GateUp tile", 4.0 * kRows * kHostTileI * kH, [&] {
    worker.GateUp({x.data(), kH, kRows, kH, w_gate.data(), w_up.data(), kH, kHostTileI, gate.data(),
                   up.data(), h.data(), kI, kNoLimit});
  });
  Report(options, "Down tile", 2.0 * kRows * kHostTileH * kI, [&] {
    worker.Down({h.data(), kI, kRows, kI, w_down.data(), kI, kHostTileH, y.data(), kH});
  });
  Report(options, "DownGrad tile", 2.0 * kRows * kHostTileI * kH, [&] {
    worker.DownGrad({x.data(), kH, kRows, kH, w_down.data(), kI, kHostTileI, gate.data(), up.data(),
                     kI, weight.data(), kNoLimit, d_gate.data(), d_up.data(), h.data(), kI,
                     partial.data(), 1});
  });
  Report(options, "InputGrad tile", 4.0 * kRows * kHostTileH * kI, [&] {
    worker.InputGrad({d_gate.data(), d_up.data(), kI, kRows, kI, w_gate.data(), w_up.data(), kH,
                      kHostTileH, y.data(), kH});
  });
  WeightGradTile tile;
  tile.a = d_gate.data();
  tile.a_stride = kI;
  tile.b = x.data();
  tile.b_stride = kH;
  tile.rows = kRows;
  tile.m = kHostGradTileRows;
  tile.n = kHostGradTileColumns;
  tile.out = w_gate.data();
  tile.out_stride = kH;
  tile.out_dtype = options.dtype;
  Report(options, "WeightGrad tile, 128 rows", 2.0 * kRows * tile.m * tile.n,
         [&] { worker.WeightGrad(tile); });
}

}  // namespace
}  // namespace mok

int main(int argc, char** argv) {
  using namespace mok;
  Options options = {BestIsa(), DType::kBf16, 1, 21};
  if (argc > 1) options.isa = ParseIsa(argv[1]).value();
  if (argc > 2) options.dtype = std::string(argv[2]) == "fp32" ? DType::kFp32 : DType::kBf16;
  if (argc > 3) options.workers = std::atoi(argv[3]);
  if (argc > 4) options.repeats = std::atoi(argv[4]);
  std::printf("isa %s, dtype %s, %d workers, %d repeats\n", IsaName(options.isa),
              DTypeName(options.dtype), options.workers, options.repeats);
  BenchProducts(options);
  BenchTiles(options);
  return 0;
}
