// Vector clocks whose 128-entry chunks are shared until written. After a barrier hundreds of
// threads know the same: sharing makes their clocks cost one chunk, and joins of equal chunks cost
// nothing.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace mok::emulator {

// A map from agent to the latest clock of it that is known, 0 where nothing is.
class VectorClock {
 public:
  static constexpr int kChunk = 128;

  VectorClock() = default;
  VectorClock(const VectorClock& other) { *this = other; }
  VectorClock(VectorClock&& other) noexcept : chunks_(std::move(other.chunks_)) {
    other.chunks_.clear();
  }
  VectorClock& operator=(const VectorClock& other);
  VectorClock& operator=(VectorClock&& other) noexcept {
    chunks_.swap(other.chunks_);
    return *this;
  }
  ~VectorClock() { Clear(); }

  uint32_t operator[](uint32_t agent) const {
    const uint32_t chunk = agent / kChunk;
    if (chunk >= chunks_.size() || chunks_[chunk] == nullptr) return 0;
    return chunks_[chunk]->values[agent % kChunk];
  }

  // Raises one entry to at least `value`.
  void Raise(uint32_t agent, uint32_t value);
  // Element-wise maximum; from chunk `first_chunk` on.
  void Join(const VectorClock& other, uint32_t first_chunk = 0);
  // Element-wise minimum.
  void Meet(const VectorClock& other);
  void Clear();

 private:
  struct Chunk {
    uint32_t references;
    uint32_t values[kChunk];
  };

  static void Release(Chunk* chunk);
  // A chunk that only this clock refers to.
  Chunk* Writable(uint32_t index);

  std::vector<Chunk*> chunks_;
};

// What a thread knows of the others' accesses, by the ways in which it may rely on them.
struct Clock {
  VectorClock happened;      // ordered before what the thread does through the generic proxy
  VectorClock async_shared;  // ... and before async-proxy accesses to shared memory
  VectorClock async_global;  // ... and before async-proxy accesses to global memory
  VectorClock tensor;        // ... and handed over by a tcgen05 fence

  void Join(const Clock& other) {
    happened.Join(other.happened);
    async_shared.Join(other.async_shared);
    async_global.Join(other.async_global);
    tensor.Join(other.tensor);
  }
  void Meet(const Clock& other) {
    happened.Meet(other.happened);
    async_shared.Meet(other.async_shared);
    async_global.Meet(other.async_global);
  }
};

}  // namespace mok::emulator
