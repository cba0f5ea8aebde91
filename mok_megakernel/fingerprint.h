// A 64-bit hash of int32 words, to notice differences that are no attack.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace mok {

// Four independent multiply-add chains, so that hashing costs no more than copying.
inline uint64_t Fingerprint(std::span<const int32_t> words) {
  uint64_t sums[4] = {1, 2, 3, words.size()};
  for (size_t i = 0; i < words.size(); ++i) {
    uint64_t& sum = sums[i % 4];
    sum = (sum ^ static_cast<uint32_t>(words[i])) * 0x9e3779b97f4a7c15;
  }
  return sums[0] ^ (sums[1] << 1) ^ (sums[2] << 2) ^ (sums[3] << 3);
}

}  // namespace mok
