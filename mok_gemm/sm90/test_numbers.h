// Random inputs and error norms of GEMM tests.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace mok::testing {

inline constexpr uint16_t kNanBits = 0x7FC1;     // of unused inputs
inline constexpr uint16_t kPoisonBits = 0xFFFF;  // of outputs before a run

// The value of bf16 bits.
double BFloat16Value(uint16_t bits);

// `count` bf16 numbers, about normal with standard deviation `scale`. Any element depends on the
// seed and its index only.
std::vector<uint16_t> Normals(size_t count, uint64_t seed, float scale);

// body(0) .. body(count - 1) on `num_threads` threads.
void ParallelFor(int64_t count, int num_threads, const std::function<void(int64_t)>& body);

// The norm of differences over the norm of references.
struct ErrorSums {
  double difference = 0, reference = 0;
  void Add(double actual, double exact) {
    difference += (actual - exact) * (actual - exact);
    reference += exact * exact;
  }
  void Add(const ErrorSums& other) {
    difference += other.difference;
    reference += other.reference;
  }
  double Relative() const {
    return reference > 0 ? std::sqrt(difference / reference) : std::sqrt(difference);
  }
};

}  // namespace mok::testing
