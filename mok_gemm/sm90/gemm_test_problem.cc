#include "mok_gemm/sm90/gemm_test_problem.h"

#include <algorithm>
#include <cmath>

#include "mok_core/bits.h"
#include "mok_core/device/runtime.h"
#include "mok_gemm/sm90/test_numbers.h"

namespace mok::testing {
namespace {

constexpr double kTensorTolerance = 4e-3, kRowTolerance = 2e-2;

void Check(const Status& status) { MOK_CHECK(status.ok()) << status; }

}  // namespace

std::string GemmTestSpec::ToString() const {
  std::string text = StrCat(epilogue == GemmEpilogue::kSwiGlu ? "swiglu" : "store", " k ", k,
                            " width ", width, " seed ", seed, " limit ", swiglu_limit, " rows");
  for (int32_t count : counts) text += StrCat(" ", count);
  return text;
}

GemmTestProblem::GemmTestProblem(const GemmTestSpec& spec) : spec_(spec) {
  for (int32_t count : spec.counts) {
    rows_ = RoundUp(rows_ + spec.row_gap, int64_t{spec.block_rows});
    begin_.push_back(static_cast<int32_t>(rows_));
    rows_ += count;
  }
  rows_ = std::max<int64_t>(rows_, 1);
  expert_of_row_.assign(rows_, -1);
  for (size_t e = 0; e < spec.counts.size(); ++e) {
    std::fill_n(expert_of_row_.begin() + begin_[e], spec.counts[e], static_cast<int32_t>(e));
  }
  a_stride_ = spec.k + spec.stride_extra;
  out_stride_ = spec.width + spec.stride_extra;
  a_ = Normals(rows_ * a_stride_, spec.seed, 1.0f);
  for (int64_t row = 0; row < rows_; ++row) {
    const auto begin = a_.begin() + row * a_stride_;
    std::fill(begin + (expert_of_row_[row] < 0 ? 0 : spec.k), begin + a_stride_, kNanBits);
  }
  const float scale = 1 / std::sqrt(static_cast<float>(spec.k));
  for (int i = 0; i < (spec.epilogue == GemmEpilogue::kSwiGlu ? 2 : 1); ++i) {
    weights_[i] = Normals(spec.counts.size() * spec.width * spec.k, spec.seed + 1 + i, scale);
  }
  Upload();
}

GemmTestProblem::~GemmTestProblem() {
  for (void* allocation : allocations_) Check(runtime::Free(allocation));
}

void GemmTestProblem::Upload() {
  auto allocate = [&](size_t bytes, const char* name) {
    allocations_.push_back(runtime::AllocateDevice(0, bytes, name).value());
    return allocations_.back();
  };
  auto upload = [&](const auto& values, const char* name) {
    const size_t bytes = values.size() * sizeof values[0];
    void* device = allocate(bytes, name);
    Check(runtime::CopyToDevice(device, values.data(), bytes));
    return device;
  };
  auto output = [&](const char* name) {
    return static_cast<BFloat16*>(allocate(rows_ * out_stride_ * sizeof(BFloat16), name));
  };
  problem_.epilogue = spec_.epilogue;
  problem_.a = static_cast<const BFloat16*>(upload(a_, "A"));
  problem_.rows = rows_;
  problem_.k = spec_.k;
  problem_.a_stride = a_stride_;
  problem_.expert_begin = static_cast<const int32_t*>(upload(begin_, "expert_begin"));
  problem_.expert_count = static_cast<const int32_t*>(upload(spec_.counts, "expert_count"));
  problem_.experts = static_cast<int64_t>(spec_.counts.size());
  problem_.weights = static_cast<const BFloat16*>(upload(weights_[0], "weights"));
  problem_.width = spec_.width;
  problem_.out = output("out");
  problem_.out_stride = out_stride_;
  problem_.swiglu_limit = spec_.swiglu_limit;
  if (spec_.epilogue != GemmEpilogue::kSwiGlu) return;
  problem_.weights_up = static_cast<const BFloat16*>(upload(weights_[1], "weights_up"));
  problem_.gate = output("gate");
  problem_.up = output("up");
}

double GemmTestProblem::flops() const {
  double rows = 0;
  for (int32_t count : spec_.counts) rows += count;
  const double columns =
      static_cast<double>(spec_.width) * (spec_.epilogue == GemmEpilogue::kSwiGlu ? 2 : 1);
  return 2 * rows * columns * static_cast<double>(spec_.k);
}

void GemmTestProblem::Poison() const {
  for (BFloat16* output : {problem_.out, problem_.gate, problem_.up}) {
    if (output == nullptr) continue;
    Check(runtime::Fill(output, 0xFF, rows_ * out_stride_ * sizeof(BFloat16)));
  }
}

std::vector<GemmTestProblem::Output> GemmTestProblem::CopyOutputs() const {
  std::vector<Output> outputs;
  if (spec_.epilogue == GemmEpilogue::kSwiGlu) {
    outputs = {{"g", problem_.gate, {}}, {"u", problem_.up, {}}, {"h", problem_.out, {}}};
  } else {
    outputs = {{"C", problem_.out, {}}};
  }
  for (Output& output : outputs) {
    output.host.resize(rows_ * out_stride_);
    Check(runtime::CopyToHost(output.host.data(), output.device, output.host.size() * 2));
  }
  return outputs;
}

std::vector<uint16_t> GemmTestProblem::Results() const {
  std::vector<uint16_t> results;
  for (const Output& output : CopyOutputs()) {
    for (int64_t row = 0; row < rows_; ++row) {
      if (expert_of_row_[row] < 0) continue;
      const auto begin = output.host.begin() + row * out_stride_;
      results.insert(results.end(), begin, begin + spec_.width);
    }
  }
  return results;
}

std::string GemmTestProblem::FindStrayWrite(const Output& output) const {
  for (int64_t row = 0; row < rows_; ++row) {
    const bool used = expert_of_row_[row] >= 0;
    for (int64_t column = 0; column < out_stride_; ++column) {
      const uint16_t bits = output.host[row * out_stride_ + column];
      const bool valid = used && column < spec_.width;
      if (!valid && bits != kPoisonBits) {
        return StrCat(output.name, "[", row, ", ", column, "] was written");
      }
      if (valid && std::isnan(BFloat16Value(bits))) {
        return StrCat(output.name, "[", row, ", ", column, "] is NaN");
      }
    }
  }
  return "";
}

double GemmTestProblem::Exact(int weights, int64_t row, int expert, int64_t column) const {
  const uint16_t* a = &a_[row * a_stride_];
  const uint16_t* b = &weights_[weights][(expert * spec_.width + column) * spec_.k];
  double sum = 0;
  for (int64_t k = 0; k < spec_.k; ++k) sum += BFloat16Value(a[k]) * BFloat16Value(b[k]);
  return sum;
}

std::string GemmTestProblem::CompareProducts(const std::vector<Output>& outputs,
                                             const std::vector<int64_t>& sample,
                                             int num_threads) const {
  const int products = spec_.epilogue == GemmEpilogue::kSwiGlu ? 2 : 1;
  for (int i = 0; i < products; ++i) {
    std::vector<ErrorSums> rows(sample.size());
    ParallelFor(static_cast<int64_t>(sample.size()), num_threads, [&](int64_t s) {
      const int64_t row = sample[s];
      for (int64_t column = 0; column < spec_.width; ++column) {
        rows[s].Add(BFloat16Value(outputs[i].host[row * out_stride_ + column]),
                    Exact(i, row, expert_of_row_[row], column));
      }
    });
    ErrorSums all;
    for (size_t s = 0; s < sample.size(); ++s) {
      all.Add(rows[s]);
      if (!(rows[s].Relative() <= kRowTolerance)) {
        return StrCat(outputs[i].name, " row ", sample[s], ": error ", rows[s].Relative());
      }
    }
    if (!(all.Relative() <= kTensorTolerance)) {
      return StrCat(outputs[i].name, ": error ", all.Relative());
    }
  }
  return "";
}

std::string GemmTestProblem::CompareHidden(const std::vector<Output>& outputs) const {
  const double limit = spec_.swiglu_limit;
  for (int64_t row = 0; row < rows_; ++row) {
    if (expert_of_row_[row] < 0) continue;
    for (int64_t column = 0; column < spec_.width; ++column) {
      const int64_t i = row * out_stride_ + column;
      const double g = std::min(BFloat16Value(outputs[0].host[i]), limit);
      const double u = std::clamp(BFloat16Value(outputs[1].host[i]), -limit, limit);
      const double exact = g / (1 + std::exp(-g)) * u, actual = BFloat16Value(outputs[2].host[i]);
      if (!(std::fabs(actual - exact) <= 0x1.01p-8 * std::fabs(exact) + 1e-35)) {
        return StrCat("h[", row, ", ", column, "] = ", actual, ", expected ", exact);
      }
    }
  }
  return "";
}

std::string GemmTestProblem::Compare(int rows_per_expert, int num_threads) const {
  const std::vector<Output> outputs = CopyOutputs();
  for (const Output& output : outputs) {
    if (std::string error = FindStrayWrite(output); !error.empty()) return error;
  }
  std::vector<int64_t> sample;
  for (size_t e = 0; e < begin_.size(); ++e) {
    const int64_t count = spec_.counts[e], taken = std::min<int64_t>(count, rows_per_expert);
    for (int64_t i = 0; i < taken; ++i) {
      const int64_t spread = taken > 1 ? i * (count - 1) / (taken - 1) : 0;
      sample.push_back(begin_[e] + spread);
    }
  }
  if (std::string error = CompareProducts(outputs, sample, num_threads); !error.empty()) {
    return error;
  }
  return spec_.epilogue == GemmEpilogue::kSwiGlu ? CompareHidden(outputs) : "";
}

}  // namespace mok::testing
