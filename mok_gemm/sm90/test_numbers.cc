#include "mok_gemm/sm90/test_numbers.h"

#include <algorithm>
#include <thread>

#include "mok_core/bits.h"
#include "mok_core/dtype.h"

namespace mok::testing {
namespace {

// splitmix64 (Steele, Lea and Flood, 2014): any element on its own, so that threads can share.
uint64_t Hash(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

// About normal, unit variance: the sum of four uniform numbers of 16 bits.
float Normal(uint64_t key) {
  const uint64_t bits = Hash(key);
  int sum = 0;
  for (int i = 0; i < 4; ++i) sum += static_cast<int>(bits >> 16 * i & 0xFFFF);
  return static_cast<float>(sum - 131070) / 37837.2f;
}

}  // namespace

double BFloat16Value(uint16_t bits) { return ToFloat(BFloat16{bits}); }

void ParallelFor(int64_t count, int num_threads, const std::function<void(int64_t)>& body) {
  if (count <= 1 || num_threads <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  std::vector<std::thread> threads;
  for (int t = 0; t < num_threads; ++t) {
    threads.emplace_back([&, t] {
      for (int64_t i = t; i < count; i += num_threads) body(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

std::vector<uint16_t> Normals(size_t count, uint64_t seed, float scale) {
  constexpr size_t kChunk = size_t{1} << 20;
  std::vector<uint16_t> values(count);
  auto fill = [&](int64_t chunk) {
    const size_t begin = static_cast<size_t>(chunk) * kChunk;
    for (size_t i = begin; i < std::min(begin + kChunk, count); ++i) {
      values[i] = RoundToBFloat16(scale * Normal(seed << 40 ^ i)).bits;
    }
  };
  const auto chunks = static_cast<int64_t>(CeilDiv(count, kChunk));
  ParallelFor(chunks, static_cast<int>(std::thread::hardware_concurrency()), fill);
  return values;
}

}  // namespace mok::testing
