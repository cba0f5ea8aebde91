// Random problems for the backward's tiles in device memory, and the comparison of their results
// with float64. Serves the emulator and a GPU: everything goes through the host seam.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "mok_gemm/sm90/backward_gemm_params.h"

namespace mok::testing {

// The tile of a kernel, for host code.
struct BackwardTileSize {
  int rows, columns;
};

struct BackwardTestSpec {
  std::vector<int32_t> counts;  // rows of each expert
  int64_t hidden = 64, intermediate = 64;
  int row_gap = 0;     // unused rows before each expert's, filled with NaN
  int block_rows = 1;  // experts begin at multiples of it (after the gap)
  float swiglu_limit = 1;
  bool one_weight = false;         // router_weight_step 0
  bool gate_form = false;          // weight gradient [I, H] of (dg, x), not [H, I] of (dout, w h)
  DType out_dtype = DType::kBf16;  // of weight gradients
  bool accumulate = false;
  int32_t piece_rows = 1 << 30;  // of weight gradients, a multiple of 64
  uint32_t seed = 1;

  std::string ToString() const;
};

class BackwardTestProblem {
 public:
  BackwardTestProblem(const BackwardTestSpec& spec, const BackwardTileSize& tile);
  ~BackwardTestProblem();
  BackwardTestProblem(const BackwardTestProblem&) = delete;
  BackwardTestProblem& operator=(const BackwardTestProblem&) = delete;

  const BackwardTestSpec& spec() const { return spec_; }
  // Launches that the weight gradients take.
  int pieces() const;
  // Of one launch, without its wait and its panels' size.
  BackwardGemmParams Params(uint32_t products, int piece) const;
  double Flops(uint32_t product) const;

  // Fills the outputs with NaN (0xFF), accumulated ones with their first values.
  void Poison() const;

  // The bits that these products have stored, valid rows and columns only.
  std::vector<uint32_t> Results(uint32_t products) const;

  // Empty, or what is wrong: elements written that should not be, NaNs, or an error beyond 4e-3 of
  // a whole tensor or 2e-2 of a row against float64 (fp32: 1e-4 and 1e-3; norms of the difference
  // over norms of the reference). sample: at most how many rows of each expert, or of its weight
  // gradient, are compared.
  std::string Compare(uint32_t products, int sample, int num_threads) const;

 private:
  struct Matrix;
  using MatrixPointer = std::unique_ptr<Matrix>;
  using ExactRow = std::vector<double>;
  struct SampledRow {
    int64_t row;
    int expert;
  };
  // Fills exact rows of outputs[0], outputs[1], ... for one row of them.
  using RowFunction = std::function<void(int64_t row, int expert, std::vector<ExactRow>& exact)>;

  void PlaceExperts();
  MatrixPointer Allocate(const char* name, int64_t rows, int64_t columns, DType dtype);
  MatrixPointer RowsInput(const char* name, int64_t columns, float scale);
  MatrixPointer Weights(const char* name, int64_t rows, int64_t columns);
  MatrixPointer Outputs(const char* name, int64_t columns);
  void MakeRouterWeights();
  void MakeWeightGradient();
  std::vector<const Matrix*> OutputsOf(uint32_t products) const;
  std::string FindStray(const Matrix& output, bool stores_all_rows) const;
  std::vector<SampledRow> SampleRows(const Matrix& output, int sample) const;
  std::string CompareRows(std::vector<const Matrix*> outputs, int sample, int num_threads,
                          const RowFunction& function) const;
  std::string CompareEmptyExperts() const;
  static void AddScaled(double scale, const Matrix& matrix, int64_t row, ExactRow& sums);
  void ExactDownGrad(int64_t row, int expert, std::vector<ExactRow>& exact) const;
  void ExactInputGrad(int64_t row, int expert, std::vector<ExactRow>& exact) const;
  void ExactGateUp(int64_t row, int expert, std::vector<ExactRow>& exact) const;
  void ExactWeightGrad(int64_t row, int expert, std::vector<ExactRow>& exact) const;
  const Matrix& WeightGradA() const { return spec_.gate_form ? *d_gate_in_ : *d_out_; }
  const Matrix& WeightGradB() const { return spec_.gate_form ? *d_out_ : *hidden_in_; }

  BackwardTestSpec spec_;
  BackwardTileSize tile_;
  int64_t rows_ = 0;
  std::vector<int32_t> begin_, expert_of_row_;  // -1: unused
  std::vector<void*> allocations_;
  const int32_t *device_begin_ = nullptr, *device_count_ = nullptr;
  float* carry_ = nullptr;
  // Inputs. dout also serves as x, hidden_in as w * h.
  MatrixPointer d_out_, gate_, up_, d_gate_in_, d_up_in_, hidden_in_, router_weight_;
  MatrixPointer weight_down_, weight_gate_, weight_up_, before_;
  // Outputs.
  MatrixPointer d_gate_, d_up_, weighted_h_, partial_, d_x_, d_weight_, g_, u_, h_;
};

}  // namespace mok::testing
