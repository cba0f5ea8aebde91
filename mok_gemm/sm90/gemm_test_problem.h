// A random grouped GEMM in device memory, and the comparison of its results with float64. Serves
// the emulator and a GPU: everything goes through the host seam.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mok_gemm/sm90/grouped_gemm.h"

namespace mok::testing {

struct GemmTestSpec {
  GemmEpilogue epilogue = GemmEpilogue::kStore;
  std::vector<int32_t> counts;  // rows of each expert
  int64_t k = 64, width = 64;
  int row_gap = 0;       // unused rows before each expert's, filled with NaN
  int block_rows = 1;    // experts begin at multiples of it (after the gap)
  int stride_extra = 0;  // elements that rows of A and of the outputs have beyond their width
  float swiglu_limit = 0;
  uint32_t seed = 1;

  std::string ToString() const;
};

class GemmTestProblem {
 public:
  // Fills A and the weights with values of about unit variance (weights: 1 / k).
  explicit GemmTestProblem(const GemmTestSpec& spec);
  ~GemmTestProblem();
  GemmTestProblem(const GemmTestProblem&) = delete;
  GemmTestProblem& operator=(const GemmTestProblem&) = delete;

  const GroupedGemmProblem& problem() const { return problem_; }
  const GemmTestSpec& spec() const { return spec_; }
  double flops() const;

  // Fills the outputs with NaN (0xFF).
  void Poison() const;

  // All outputs, expert after expert, valid rows and columns only.
  std::vector<uint16_t> Results() const;

  // Empty, or what is wrong: rows or columns written that should not be, NaNs, or an error beyond
  // 4e-3 of the whole tensor or 2e-2 of a row against float64 (norms of the difference over norms
  // of the reference); h also against SwiGLU of the stored g and u, element by element.
  // rows_per_expert: how many rows of each expert are compared, spread over all, with the first
  // and the last; num_threads: of the host.
  std::string Compare(int rows_per_expert, int num_threads) const;

 private:
  struct Output {
    const char* name;
    BFloat16* device;
    std::vector<uint16_t> host;
  };
  void Upload();
  std::vector<Output> CopyOutputs() const;
  std::string FindStrayWrite(const Output& output) const;
  std::string CompareProducts(const std::vector<Output>& outputs,
                              const std::vector<int64_t>& sample, int num_threads) const;
  std::string CompareHidden(const std::vector<Output>& outputs) const;
  double Exact(int weights, int64_t row, int expert, int64_t column) const;

  GemmTestSpec spec_;
  int64_t rows_ = 0, a_stride_ = 0, out_stride_ = 0;
  std::vector<int32_t> begin_;
  std::vector<int32_t> expert_of_row_;  // -1: unused
  std::vector<uint16_t> a_, weights_[2];
  std::vector<void*> allocations_;
  GroupedGemmProblem problem_;
};

}  // namespace mok::testing
