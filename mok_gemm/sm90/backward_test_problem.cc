#include "mok_gemm/sm90/backward_test_problem.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>

#include "mok_core/bits.h"
#include "mok_core/device/runtime.h"
#include "mok_gemm/sm90/tensor_maps.h"
#include "mok_gemm/sm90/test_numbers.h"

namespace mok::testing {
namespace {

void Check(const Status& status) { MOK_CHECK(status.ok()) << status; }

double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

}  // namespace

// A matrix in device memory and what the host knows of it: the values of an input, the results of
// an output after Fetch.
struct BackwardTestProblem::Matrix {
  const char* name;
  int64_t rows, columns;
  DType dtype;
  void* device;
  std::vector<uint16_t> bf16;
  std::vector<float> fp32;

  double At(int64_t row, int64_t column) const {
    const int64_t i = row * columns + column;
    return dtype == DType::kBf16 ? BFloat16Value(bf16[i]) : fp32[i];
  }
  uint32_t Bits(int64_t row, int64_t column) const {
    const int64_t i = row * columns + column;
    return dtype == DType::kBf16 ? bf16[i] : BitCast<uint32_t>(fp32[i]);
  }
  int64_t bytes() const { return rows * columns * ElementBytes(dtype); }
  void* host() { return dtype == DType::kBf16 ? static_cast<void*>(bf16.data()) : fp32.data(); }
  void Upload() { Check(runtime::CopyToDevice(device, host(), bytes())); }
  void Fetch() {
    bf16.resize(dtype == DType::kBf16 ? rows * columns : 0);
    fp32.resize(dtype == DType::kFp32 ? rows * columns : 0);
    Check(runtime::CopyToHost(host(), device, bytes()));
  }
  TensorMap RowsMap() const {
    const auto* base = static_cast<const BFloat16*>(device);
    const auto spec = ActivationMapSpec(base, rows, columns, columns).value();
    return runtime::EncodeTensorMap(spec).value();
  }
  WeightMatrix ToWeights(int64_t experts) const {
    return {static_cast<const BFloat16*>(device), experts, rows / experts, columns};
  }
  TensorMap ContractedMap(int64_t experts) const {
    return runtime::EncodeTensorMap(ContractedWeightMapSpec(ToWeights(experts)).value()).value();
  }
  TensorMap ForwardMap(int64_t experts, int half_columns) const {
    const auto spec = WeightMapSpec(ToWeights(experts), ColumnOrder::kNatural, half_columns);
    return runtime::EncodeTensorMap(spec.value()).value();
  }
};

std::string BackwardTestSpec::ToString() const {
  std::string text = StrCat(
      "hidden ", hidden, " intermediate ", intermediate, " gap ", row_gap, " limit ", swiglu_limit,
      one_weight ? " one weight" : "", gate_form ? " gate form" : "", " ", DTypeName(out_dtype),
      accumulate ? " accumulate" : "", " pieces of ", piece_rows, " seed ", seed, " rows");
  for (int32_t count : counts) text += StrCat(" ", count);
  return text;
}

BackwardTestProblem::BackwardTestProblem(const BackwardTestSpec& spec, const BackwardTileSize& tile)
    : spec_(spec), tile_(tile) {
  PlaceExperts();
  const int64_t h = spec.hidden, i = spec.intermediate;
  const auto experts = static_cast<int64_t>(spec.counts.size());
  d_out_ = RowsInput("dout", h, 1);
  gate_ = RowsInput("g", i, 1.5f);
  up_ = RowsInput("u", i, 1.5f);
  d_gate_in_ = RowsInput("dg_in", i, 1);
  d_up_in_ = RowsInput("du_in", i, 1);
  hidden_in_ = RowsInput("wh_in", i, 1);
  MakeRouterWeights();
  weight_down_ = Weights("Wd", experts * h, i);
  weight_gate_ = Weights("Wg", experts * i, h);
  weight_up_ = Weights("Wu", experts * i, h);
  d_gate_ = Outputs("dg", i);
  d_up_ = Outputs("du", i);
  weighted_h_ = Outputs("wh", i);
  partial_ = Allocate("partial", rows_, CeilDiv(i, int64_t{tile.columns}), DType::kFp32);
  d_x_ = Outputs("dx", h);
  g_ = Outputs("g_out", i);
  u_ = Outputs("u_out", i);
  h_ = Outputs("h_out", i);
  MakeWeightGradient();
}

BackwardTestProblem::~BackwardTestProblem() {
  for (void* allocation : allocations_) Check(runtime::Free(allocation));
}

void BackwardTestProblem::PlaceExperts() {
  for (int32_t count : spec_.counts) {
    rows_ = RoundUp(rows_ + spec_.row_gap, int64_t{spec_.block_rows});
    begin_.push_back(static_cast<int32_t>(rows_));
    rows_ += count;
  }
  rows_ = std::max<int64_t>(rows_, 1);
  expert_of_row_.assign(rows_, -1);
  for (size_t e = 0; e < spec_.counts.size(); ++e) {
    std::fill_n(expert_of_row_.begin() + begin_[e], spec_.counts[e], static_cast<int32_t>(e));
  }
  auto upload = [&](const std::vector<int32_t>& values, const char* name) {
    void* device = runtime::AllocateDevice(0, values.size() * sizeof(int32_t), name).value();
    allocations_.push_back(device);
    Check(runtime::CopyToDevice(device, values.data(), values.size() * sizeof(int32_t)));
    return static_cast<const int32_t*>(device);
  };
  device_begin_ = upload(begin_, "expert_begin");
  device_count_ = upload(spec_.counts, "expert_count");
}

BackwardTestProblem::MatrixPointer BackwardTestProblem::Allocate(const char* name, int64_t rows,
                                                                 int64_t columns, DType dtype) {
  auto matrix = std::make_unique<Matrix>(Matrix{name, rows, columns, dtype, nullptr, {}, {}});
  matrix->device = runtime::AllocateDevice(0, matrix->bytes(), name).value();
  allocations_.push_back(matrix->device);
  return matrix;
}

BackwardTestProblem::MatrixPointer BackwardTestProblem::RowsInput(const char* name, int64_t columns,
                                                                  float scale) {
  MatrixPointer matrix = Allocate(name, rows_, columns, DType::kBf16);
  matrix->bf16 = Normals(rows_ * columns, spec_.seed + allocations_.size(), scale);
  for (int64_t row = 0; row < rows_; ++row) {
    if (expert_of_row_[row] >= 0) continue;
    std::fill_n(matrix->bf16.begin() + row * columns, columns, kNanBits);
  }
  matrix->Upload();
  return matrix;
}

// Scaled so that a product has about unit variance.
BackwardTestProblem::MatrixPointer BackwardTestProblem::Weights(const char* name, int64_t rows,
                                                                int64_t columns) {
  MatrixPointer matrix = Allocate(name, rows, columns, DType::kBf16);
  const auto depth = static_cast<float>(rows / static_cast<int64_t>(spec_.counts.size()));
  matrix->bf16 = Normals(rows * columns, spec_.seed + allocations_.size(), 1 / std::sqrt(depth));
  matrix->Upload();
  return matrix;
}

BackwardTestProblem::MatrixPointer BackwardTestProblem::Outputs(const char* name, int64_t columns) {
  return Allocate(name, rows_, columns, DType::kBf16);
}

void BackwardTestProblem::MakeRouterWeights() {
  router_weight_ = Allocate("router_weight", spec_.one_weight ? 1 : rows_, 1, DType::kFp32);
  for (uint16_t bits : Normals(router_weight_->rows, spec_.seed + 100, 0.5f)) {
    router_weight_->fp32.push_back(static_cast<float>(BFloat16Value(bits)) + 0.001f);
  }
  router_weight_->Upload();
}

void BackwardTestProblem::MakeWeightGradient() {
  const auto experts = static_cast<int64_t>(spec_.counts.size());
  const int64_t m = WeightGradA().columns, n = WeightGradB().columns;
  d_weight_ = Allocate("dW", experts * m, n, spec_.out_dtype);
  before_ = std::make_unique<Matrix>(*d_weight_);
  before_->bf16 = Normals(experts * m * n, spec_.seed + 200, 3);
  if (spec_.out_dtype == DType::kFp32) {
    for (uint16_t bits : before_->bf16) {
      before_->fp32.push_back(1.001f * static_cast<float>(BFloat16Value(bits)));
    }
    before_->bf16.clear();
  }
  const int64_t tiles = CeilDiv(m, int64_t{tile_.rows}) * CeilDiv(n, int64_t{tile_.columns});
  const int64_t elements = pieces() == 1 ? 1 : experts * tiles * tile_.rows * tile_.columns;
  carry_ =
      static_cast<float*>(runtime::AllocateDevice(0, elements * sizeof(float), "carry").value());
  allocations_.push_back(carry_);
}

int BackwardTestProblem::pieces() const {
  int pieces = 1;
  for (int32_t count : spec_.counts) pieces = std::max(pieces, CeilDiv(count, spec_.piece_rows));
  return pieces;
}

BackwardGemmParams BackwardTestProblem::Params(uint32_t products, int piece) const {
  const auto experts = static_cast<int64_t>(spec_.counts.size());
  const auto h = static_cast<int32_t>(spec_.hidden);
  const auto i = static_cast<int32_t>(spec_.intermediate);
  auto bf16 = [](const MatrixPointer& matrix) { return static_cast<BFloat16*>(matrix->device); };
  BackwardGemmParams p{};
  p.products = products;
  p.piece = piece;
  p.piece_rows = spec_.piece_rows;
  p.down_grad = {d_out_->RowsMap(),
                 weight_down_->ContractedMap(experts),
                 gate_->RowsMap(),
                 up_->RowsMap(),
                 h,
                 i,
                 static_cast<const float*>(router_weight_->device),
                 spec_.one_weight ? 0 : 1,
                 spec_.swiglu_limit,
                 bf16(d_gate_),
                 bf16(d_up_),
                 bf16(weighted_h_),
                 static_cast<float*>(partial_->device)};
  p.input_grad = {d_gate_in_->RowsMap(),
                  d_up_in_->RowsMap(),
                  weight_gate_->ContractedMap(experts),
                  weight_up_->ContractedMap(experts),
                  h,
                  i,
                  bf16(d_x_)};
  p.weight_grad = {WeightGradA().RowsMap(),
                   WeightGradB().RowsMap(),
                   static_cast<int32_t>(WeightGradA().columns),
                   static_cast<int32_t>(WeightGradB().columns),
                   d_weight_->device,
                   spec_.out_dtype,
                   spec_.accumulate,
                   carry_};
  p.gate_up.rows = {device_begin_, device_count_, static_cast<int32_t>(experts)};
  p.gate_up.operands = {d_out_->RowsMap(),
                        {weight_gate_->ForwardMap(experts, tile_.columns / 2),
                         weight_up_->ForwardMap(experts, tile_.columns / 2)},
                        i,
                        CeilDiv(h, 64)};
  p.gate_up.outputs = {bf16(h_), bf16(g_), bf16(u_), i, spec_.swiglu_limit};
  return p;
}

double BackwardTestProblem::Flops(uint32_t product) const {
  double rows = 0;
  for (int32_t count : spec_.counts) rows += count;
  const bool is_double = product == kProductInputGrad || product == kProductGateUp;
  return 2 * rows * static_cast<double>(spec_.hidden * spec_.intermediate) * (is_double ? 2 : 1);
}

std::vector<const BackwardTestProblem::Matrix*> BackwardTestProblem::OutputsOf(
    uint32_t products) const {
  std::vector<const Matrix*> outputs;
  auto add = [&](uint32_t product, std::initializer_list<const Matrix*> of_product) {
    if ((products & product) != 0) outputs.insert(outputs.end(), of_product);
  };
  add(kProductDownGrad, {d_gate_.get(), d_up_.get(), weighted_h_.get(), partial_.get()});
  add(kProductInputGrad, {d_x_.get()});
  add(kProductWeightGrad, {d_weight_.get()});
  add(kProductGateUp, {g_.get(), u_.get(), h_.get()});
  return outputs;
}

void BackwardTestProblem::Poison() const {
  for (const Matrix* output : OutputsOf(~0u)) {
    Check(runtime::Fill(output->device, 0xFF, output->bytes()));
  }
  if (spec_.accumulate) before_->Upload();
}

std::vector<uint32_t> BackwardTestProblem::Results(uint32_t products) const {
  std::vector<uint32_t> results;
  for (const Matrix* output : OutputsOf(products)) {
    Matrix fetched = *output;
    fetched.Fetch();
    for (int64_t row = 0; row < fetched.rows; ++row) {
      if (output != d_weight_.get() && expert_of_row_[row] < 0) continue;
      for (int64_t c = 0; c < fetched.columns; ++c) results.push_back(fetched.Bits(row, c));
    }
  }
  return results;
}

std::string BackwardTestProblem::FindStray(const Matrix& output, bool stores_all_rows) const {
  for (int64_t row = 0; row < output.rows; ++row) {
    const bool stored = stores_all_rows || expert_of_row_[row] >= 0;
    for (int64_t column = 0; column < output.columns; ++column) {
      const uint32_t bits = output.Bits(row, column);
      const uint32_t poison = output.dtype == DType::kBf16 ? kPoisonBits : ~0u;
      if (!stored && bits != poison) {
        return StrCat(output.name, "[", row, ", ", column, "] was written");
      }
      if (stored && std::isnan(output.At(row, column))) {
        return StrCat(output.name, "[", row, ", ", column, "] is NaN");
      }
    }
  }
  return "";
}

std::vector<BackwardTestProblem::SampledRow> BackwardTestProblem::SampleRows(const Matrix& output,
                                                                             int sample) const {
  std::vector<SampledRow> rows;
  const auto experts = static_cast<int64_t>(spec_.counts.size());
  for (int64_t e = 0; e < experts; ++e) {
    const bool is_weight = &output == d_weight_.get();
    const int64_t begin = is_weight ? e * output.rows / experts : begin_[e];
    const int64_t count = is_weight ? output.rows / experts : spec_.counts[e];
    const int64_t taken = std::min<int64_t>(count, sample);
    for (int64_t i = 0; i < taken; ++i) {
      const int64_t spread = taken > 1 ? i * (count - 1) / (taken - 1) : 0;
      rows.push_back({begin + spread, static_cast<int>(e)});
    }
  }
  return rows;
}

std::string BackwardTestProblem::CompareRows(std::vector<const Matrix*> outputs, int sample,
                                             int num_threads, const RowFunction& function) const {
  const std::vector<SampledRow> rows = SampleRows(*outputs[0], sample);
  std::vector<Matrix> fetched;
  for (const Matrix* output : outputs) {
    fetched.push_back(*output);
    fetched.back().Fetch();
    const std::string error = FindStray(fetched.back(), output == d_weight_.get());
    if (!error.empty()) return error;
  }
  std::vector<std::vector<ErrorSums>> sums(rows.size());
  ParallelFor(static_cast<int64_t>(rows.size()), num_threads, [&](int64_t i) {
    std::vector<ExactRow> exact(outputs.size());
    for (size_t o = 0; o < outputs.size(); ++o) exact[o].assign(outputs[o]->columns, 0.0);
    function(rows[i].row, rows[i].expert, exact);
    sums[i].resize(outputs.size());
    for (size_t o = 0; o < outputs.size(); ++o) {
      for (int64_t c = 0; c < outputs[o]->columns; ++c) {
        sums[i][o].Add(fetched[o].At(rows[i].row, c), exact[o][c]);
      }
    }
  });
  for (size_t o = 0; o < outputs.size(); ++o) {
    // The partial sums of the router gradient contain roundings of h to bf16.
    const bool is_exact = outputs[o]->dtype == DType::kFp32 && outputs[o] != partial_.get();
    ErrorSums all;
    for (size_t i = 0; i < rows.size(); ++i) {
      all.Add(sums[i][o]);
      if (!(sums[i][o].Relative() <= (is_exact ? 1e-3 : 2e-2))) {
        return StrCat(outputs[o]->name, " row ", rows[i].row, ": error ", sums[i][o].Relative());
      }
    }
    if (!(all.Relative() <= (is_exact ? 1e-4 : 4e-3))) {
      return StrCat(outputs[o]->name, ": error ", all.Relative());
    }
  }
  return "";
}

// sums[c] += scale * matrix[row, c].
void BackwardTestProblem::AddScaled(double scale, const Matrix& matrix, int64_t row,
                                    ExactRow& sums) {
  for (int64_t c = 0; c < matrix.columns; ++c) sums[c] += scale * matrix.At(row, c);
}

void BackwardTestProblem::ExactDownGrad(int64_t row, int expert,
                                        std::vector<ExactRow>& exact) const {
  ExactRow d_hidden(spec_.intermediate, 0.0);
  for (int64_t k = 0; k < spec_.hidden; ++k) {
    AddScaled(d_out_->At(row, k), *weight_down_, expert * spec_.hidden + k, d_hidden);
  }
  const double limit = spec_.swiglu_limit;
  const double weight = router_weight_->At(spec_.one_weight ? 0 : row, 0);
  for (int64_t c = 0; c < spec_.intermediate; ++c) {
    const double g = gate_->At(row, c), u = up_->At(row, c);
    const double gate = std::min(g, limit), up = std::clamp(u, -limit, limit);
    const double sigmoid = Sigmoid(gate), silu = gate * sigmoid;
    const double h = ToFloat(RoundToBFloat16(static_cast<float>(silu * up)));
    const double d_h = weight * d_hidden[c];
    exact[0][c] = g > limit ? 0 : d_h * up * sigmoid * (1 + gate * (1 - sigmoid));
    exact[1][c] = std::fabs(u) > limit ? 0 : d_h * silu;
    exact[2][c] = weight * h;
    exact[3][c / tile_.columns] += d_hidden[c] * h;
  }
}

void BackwardTestProblem::ExactInputGrad(int64_t row, int expert,
                                         std::vector<ExactRow>& exact) const {
  for (int64_t k = 0; k < spec_.intermediate; ++k) {
    const int64_t weight_row = expert * spec_.intermediate + k;
    AddScaled(d_gate_in_->At(row, k), *weight_gate_, weight_row, exact[0]);
    AddScaled(d_up_in_->At(row, k), *weight_up_, weight_row, exact[0]);
  }
}

void BackwardTestProblem::ExactGateUp(int64_t row, int expert, std::vector<ExactRow>& exact) const {
  const double limit = spec_.swiglu_limit;
  for (int64_t c = 0; c < spec_.intermediate; ++c) {
    const int64_t weight_row = expert * spec_.intermediate + c;
    double g = 0, u = 0;
    for (int64_t k = 0; k < spec_.hidden; ++k) {
      const double x = d_out_->At(row, k);
      g += x * weight_gate_->At(weight_row, k);
      u += x * weight_up_->At(weight_row, k);
    }
    exact[0][c] = g;
    exact[1][c] = u;
    const double gate = std::min(g, limit);
    exact[2][c] = gate * Sigmoid(gate) * std::clamp(u, -limit, limit);
  }
}

void BackwardTestProblem::ExactWeightGrad(int64_t row, int expert,
                                          std::vector<ExactRow>& exact) const {
  const Matrix &a = WeightGradA(), &b = WeightGradB();
  const int64_t column = row % a.columns;
  for (int64_t k = begin_[expert]; k < begin_[expert] + spec_.counts[expert]; ++k) {
    AddScaled(a.At(k, column), b, k, exact[0]);
  }
  if (spec_.accumulate) AddScaled(1, *before_, row, exact[0]);
}

// Experts without rows: exact zeros, or not a bit changed.
std::string BackwardTestProblem::CompareEmptyExperts() const {
  Matrix fetched = *d_weight_;
  fetched.Fetch();
  const int64_t rows = fetched.rows / static_cast<int64_t>(spec_.counts.size());
  for (int64_t row = 0; row < fetched.rows; ++row) {
    if (spec_.counts[row / rows] > 0) continue;
    for (int64_t c = 0; c < fetched.columns; ++c) {
      const uint32_t expected = spec_.accumulate ? before_->Bits(row, c) : 0;
      if (fetched.Bits(row, c) != expected) {
        return StrCat("dW[", row, ", ", c, "] of an expert without rows is ", fetched.At(row, c));
      }
    }
  }
  return "";
}

std::string BackwardTestProblem::Compare(uint32_t products, int sample, int num_threads) const {
  struct Check {
    uint32_t product;
    void (BackwardTestProblem::*exact)(int64_t, int, std::vector<ExactRow>&) const;
  };
  const Check checks[] = {{kProductDownGrad, &BackwardTestProblem::ExactDownGrad},
                          {kProductInputGrad, &BackwardTestProblem::ExactInputGrad},
                          {kProductWeightGrad, &BackwardTestProblem::ExactWeightGrad},
                          {kProductGateUp, &BackwardTestProblem::ExactGateUp}};
  for (const Check& check : checks) {
    if ((products & check.product) == 0) continue;
    const std::string error =
        CompareRows(OutputsOf(check.product), sample, num_threads,
                    [&](int64_t row, int expert, std::vector<ExactRow>& exact) {
                      (this->*check.exact)(row, expert, exact);
                    });
    if (!error.empty()) return error;
  }
  return (products & kProductWeightGrad) != 0 ? CompareEmptyExperts() : "";
}

}  // namespace mok::testing
