#include "mok_megakernel/sm90/testing/model_layer.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <thread>

#include "mok_core/dtype.h"
#include "mok_core/status.h"

namespace mok::testing {
namespace {

// Runs body(begin, end) over parts of [0, count) on all cores.
void ParallelFor(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  const int64_t workers = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < workers; ++i) {
    threads.emplace_back([&, i] { body(count * i / workers, count * (i + 1) / workers); });
  }
  for (std::thread& thread : threads) thread.join();
}

// A mixing function (SplitMix64): the value of element `index` of stream `seed`.
uint64_t Mix(uint64_t seed, int64_t index) {
  uint64_t z = (seed << 40) + static_cast<uint64_t>(index) * 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

// Sum of four uniform values: close to normal, of standard deviation `scale`.
Tensor RandomTensor(int64_t size, double scale, uint64_t seed) {
  Tensor tensor(DType::kBf16, size);
  auto* values = static_cast<BFloat16*>(tensor.At(0));
  ParallelFor(size, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t bits = Mix(seed, i);
      int sum = 0;
      for (int part = 0; part < 4; ++part) sum += static_cast<int>(bits >> 16 * part & 0xFFFF);
      const double unit = (sum - 2 * 65535.0) / (65536.0 * std::sqrt(1.0 / 3));
      values[i] = RoundToBFloat16(static_cast<float>(unit * scale));
    }
  });
  return tensor;
}

struct ExpertWeights {
  const BFloat16 *gate, *up, *down;
  int64_t intermediate;
};

const BFloat16* Values(const Tensor& tensor, int64_t begin) {
  return static_cast<const BFloat16*>(tensor.At(begin));
}

// `expert` of all experts; -1: the shared one.
ExpertWeights WeightsOf(const LayerData& data, int64_t expert) {
  const LayerSpec& spec = data.spec;
  if (expert < 0) {
    return {Values(data.shared_gate, 0), Values(data.shared_up, 0), Values(data.shared_down, 0),
            spec.shared_intermediate};
  }
  const int64_t begin = expert * spec.hidden * spec.intermediate;
  return {Values(data.gate, begin), Values(data.up, begin), Values(data.down, begin),
          spec.intermediate};
}

std::vector<double> RowOf(const Tensor& matrix, int64_t row, int64_t columns) {
  std::vector<double> values(static_cast<size_t>(columns));
  for (int64_t j = 0; j < columns; ++j) values[j] = ToFloat(Values(matrix, row * columns)[j]);
  return values;
}

// Adds weight * expert(x) to out, in double.
void AddExpert(const ExpertWeights& expert, const std::vector<double>& x, double weight,
               double limit, double* out) {
  const auto hidden = static_cast<int64_t>(x.size());
  std::vector<double> h(static_cast<size_t>(expert.intermediate));
  for (int64_t i = 0; i < expert.intermediate; ++i) {
    double g = 0, u = 0;
    for (int64_t j = 0; j < hidden; ++j) {
      g += x[j] * ToFloat(expert.gate[i * hidden + j]);
      u += x[j] * ToFloat(expert.up[i * hidden + j]);
    }
    g = std::min(g, limit);
    h[i] = g / (1 + std::exp(-g)) * std::clamp(u, -limit, limit);
  }
  for (int64_t j = 0; j < hidden; ++j) {
    double y = 0;
    for (int64_t i = 0; i < expert.intermediate; ++i) {
      y += h[i] * ToFloat(expert.down[j * expert.intermediate + i]);
    }
    out[j] += weight * y;
  }
}

// Adds the gradient of weight * expert(x) to d_x, and returns that of weight. g and u are rounded
// as the layer saves them.
double AddExpertGradient(const ExpertWeights& expert, const std::vector<double>& x,
                         const std::vector<double>& d_out, double weight, double* d_x) {
  const auto hidden = static_cast<int64_t>(x.size()), width = expert.intermediate;
  std::vector<double> d_h(static_cast<size_t>(width));
  for (int64_t j = 0; j < hidden; ++j) {
    for (int64_t i = 0; i < width; ++i) d_h[i] += d_out[j] * ToFloat(expert.down[j * width + i]);
  }
  double d_weight = 0;
  for (int64_t i = 0; i < width; ++i) {
    double g = 0, u = 0;
    for (int64_t j = 0; j < hidden; ++j) {
      g += x[j] * ToFloat(expert.gate[i * hidden + j]);
      u += x[j] * ToFloat(expert.up[i * hidden + j]);
    }
    g = ToFloat(RoundToBFloat16(static_cast<float>(g)));
    u = ToFloat(RoundToBFloat16(static_cast<float>(u)));
    const double sigmoid = 1 / (1 + std::exp(-g)), silu = g * sigmoid;
    d_weight += d_h[i] * silu * u;
    const double d_gate = weight * d_h[i] * u * sigmoid * (1 + g * (1 - sigmoid));
    const double d_up = weight * d_h[i] * silu;
    for (int64_t j = 0; j < hidden; ++j) {
      d_x[j] +=
          d_gate * ToFloat(expert.gate[i * hidden + j]) + d_up * ToFloat(expert.up[i * hidden + j]);
    }
  }
  return d_weight;
}

int OwnerOf(const std::vector<int64_t>& begin, int64_t index) {
  return static_cast<int>(std::upper_bound(begin.begin(), begin.end(), index) - begin.begin()) - 1;
}

template <class T>
std::vector<int64_t> Begins(const std::vector<T>& counts) {
  std::vector<int64_t> begin = {0};
  for (const T count : counts) begin.push_back(begin.back() + count);
  return begin;
}

}  // namespace

const std::vector<ModelShape> kModelShapes = {{"kimi", 7168, 2048, 8, 6},
                                              {"glm", 6144, 2048, 8, 4},
                                              {"qwen", 4096, 1024, 10, 8},
                                              {"deepseek", 7168, 3072, 6, 6}};

LayerSpec ModelLayerSpec(const ModelShape& shape, int ep_size) {
  LayerSpec spec;
  spec.tokens.assign(static_cast<size_t>(ep_size), 2048);
  spec.experts.assign(static_cast<size_t>(ep_size), shape.local_experts);
  spec.topk = shape.topk;
  spec.hidden = shape.hidden;
  spec.intermediate = spec.shared_intermediate = shape.intermediate;
  const int64_t experts = spec.num_experts();
  // K experts that follow each other from a random one: distinct if there are enough.
  spec.route = [experts](int64_t token, int k) {
    return (static_cast<int64_t>(Mix(99, token) % static_cast<uint64_t>(experts)) + k) % experts;
  };
  return spec;
}

LayerSpec TrafficLayerSpec(const ModelShape& shape, int ep_size) {
  LayerSpec spec = ModelLayerSpec(shape, ep_size);
  const int64_t tokens = 2048 * shape.topk;
  spec.tokens.assign(static_cast<size_t>(ep_size), tokens);
  spec.topk = 1;
  spec.shared_intermediate = 256;
  const int64_t local = shape.local_experts;
  spec.route = [=](int64_t token, int) {
    const uint64_t bits = Mix(98, token);
    const int64_t remote =
        bits % 64 != 0 && ep_size > 1 ? 1 + static_cast<int64_t>(bits >> 8) % (ep_size - 1) : 0;
    const int64_t rank = (token / tokens + remote) % ep_size;
    return rank * local + static_cast<int64_t>(bits >> 32) % local;
  };
  return spec;
}

LayerData MakeLargeLayer(const LayerSpec& spec) {
  LayerSpec empty = spec;
  empty.tokens.assign(spec.tokens.size(), 0);
  empty.intermediate = empty.hidden = 8;
  empty.shared_intermediate = 0;
  LayerData data(empty);
  data.spec = spec;
  const int64_t tokens = spec.num_tokens(), width = spec.hidden;
  const int64_t expert = width * spec.intermediate, shared = width * spec.shared_intermediate;
  const auto scale = [](int64_t columns) { return 1 / std::sqrt(static_cast<double>(columns)); };
  const int64_t shared_columns = std::max<int64_t>(spec.shared_intermediate, 1);
  data.x = RandomTensor(tokens * width, 1, 1);
  data.d_out = RandomTensor(tokens * width, 1, 9);
  data.gate = RandomTensor(spec.num_experts() * expert, scale(width), 2);
  data.up = RandomTensor(spec.num_experts() * expert, scale(width), 3);
  data.down = RandomTensor(spec.num_experts() * expert, scale(spec.intermediate), 4);
  data.shared_gate = RandomTensor(shared, scale(width), 5);
  data.shared_up = RandomTensor(shared, scale(width), 6);
  data.shared_down = RandomTensor(shared, scale(shared_columns), 7);
  for (int64_t token = 0; token < tokens; ++token) {
    for (int k = 0; k < spec.topk; ++k) {
      data.topk_idx.push_back(spec.route(token, k));
      const uint64_t bits = Mix(8, token * spec.topk + k);
      data.topk_weight.push_back(0.1f + 0.9f * static_cast<float>(bits % 1024) / 1024);
    }
  }
  return data;
}

std::vector<double> ReferenceRows(const LayerData& data, const std::vector<int64_t>& tokens) {
  const LayerSpec& spec = data.spec;
  const int64_t hidden = spec.hidden;
  const double limit = spec.swiglu_limit > 0 ? spec.swiglu_limit : INFINITY;
  std::vector<double> out(tokens.size() * static_cast<size_t>(hidden));
  // A term of a token: the shared expert (-1) or route k.
  std::vector<std::vector<double>> terms(tokens.size() * static_cast<size_t>(spec.topk + 1));
  ParallelFor(static_cast<int64_t>(terms.size()), [&](int64_t begin, int64_t end) {
    for (int64_t term = begin; term < end; ++term) {
      const int64_t token = tokens[term / (spec.topk + 1)], k = term % (spec.topk + 1) - 1;
      terms[term].resize(static_cast<size_t>(hidden));
      const std::vector<double> x = RowOf(data.x, token, hidden);
      const int64_t route = token * spec.topk + k, id = k < 0 ? -1 : data.topk_idx[route];
      if (k >= 0 && id < 0) continue;
      AddExpert(WeightsOf(data, id), x, k < 0 ? 1 : data.topk_weight[route], limit,
                terms[term].data());
    }
  });
  for (size_t term = 0; term < terms.size(); ++term) {
    double* row = out.data() + term / (spec.topk + 1) * hidden;
    for (int64_t j = 0; j < hidden; ++j) row[j] += terms[term][j];
  }
  return out;
}

GradientRows ReferenceGradientRows(const LayerData& data, const std::vector<int64_t>& tokens) {
  const LayerSpec& spec = data.spec;
  const int64_t hidden = spec.hidden, terms_per_token = spec.topk + 1;
  MOK_CHECK(spec.swiglu_limit <= 0);
  GradientRows rows;
  rows.d_x.resize(tokens.size() * static_cast<size_t>(hidden));
  rows.d_topk_weight.resize(tokens.size() * static_cast<size_t>(spec.topk));
  std::vector<std::vector<double>> terms(tokens.size() * static_cast<size_t>(terms_per_token));
  ParallelFor(static_cast<int64_t>(terms.size()), [&](int64_t begin, int64_t end) {
    for (int64_t term = begin; term < end; ++term) {
      const int64_t index = term / terms_per_token, token = tokens[index];
      const int64_t k = term % terms_per_token - 1, route = token * spec.topk + k;
      terms[term].resize(static_cast<size_t>(hidden));
      const int64_t id = k < 0 ? -1 : data.topk_idx[route];
      if (k >= 0 ? id < 0 : spec.shared_intermediate == 0) continue;
      const double d_weight = AddExpertGradient(
          WeightsOf(data, id), RowOf(data.x, token, hidden), RowOf(data.d_out, token, hidden),
          k < 0 ? 1 : data.topk_weight[route], terms[term].data());
      if (k >= 0) rows.d_topk_weight[index * spec.topk + k] = d_weight;
    }
  });
  for (size_t term = 0; term < terms.size(); ++term) {
    double* row = rows.d_x.data() + term / terms_per_token * hidden;
    for (int64_t j = 0; j < hidden; ++j) row[j] += terms[term][j];
  }
  return rows;
}

std::vector<int64_t> SampleTokens(int64_t num_tokens, int64_t count) {
  std::vector<int64_t> tokens;
  count = std::min(count, num_tokens);
  for (int64_t i = 0; i < count; ++i) {
    tokens.push_back(count == 1 ? 0 : i * (num_tokens - 1) / (count - 1));
  }
  return tokens;
}

double BusiestLinkBytes(const LayerData& data) {
  const LayerSpec& spec = data.spec;
  const std::vector<int64_t> tokens = Begins(spec.tokens), experts = Begins(spec.experts);
  std::vector<double> into(spec.tokens.size()), out_of(spec.tokens.size());
  for (size_t route = 0; route < data.topk_idx.size(); ++route) {
    if (data.topk_idx[route] < 0) continue;
    const int source = OwnerOf(tokens, static_cast<int64_t>(route) / spec.topk);
    const int owner = OwnerOf(experts, data.topk_idx[route]);
    if (source == owner) continue;
    // Dispatch goes one way, combine the other.
    for (const int rank : {source, owner}) {
      into[rank] += 2.0 * static_cast<double>(spec.hidden);
      out_of[rank] += 2.0 * static_cast<double>(spec.hidden);
    }
  }
  double most = 0;
  for (size_t rank = 0; rank < into.size(); ++rank) {
    most = std::max({most, into[rank], out_of[rank]});
  }
  return most;
}

}  // namespace mok::testing
