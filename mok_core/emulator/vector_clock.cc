#include "mok_core/emulator/vector_clock.h"

#include <algorithm>
#include <cstring>

namespace mok::emulator {

void VectorClock::Release(Chunk* chunk) {
  if (chunk != nullptr && --chunk->references == 0) delete chunk;
}

void VectorClock::Clear() {
  for (Chunk* chunk : chunks_) Release(chunk);
  chunks_.clear();
}

VectorClock& VectorClock::operator=(const VectorClock& other) {
  for (Chunk* chunk : other.chunks_) {
    if (chunk != nullptr) ++chunk->references;
  }
  std::vector<Chunk*> copy = other.chunks_;
  Clear();
  chunks_.swap(copy);
  return *this;
}

VectorClock::Chunk* VectorClock::Writable(uint32_t index) {
  if (index >= chunks_.size()) chunks_.resize(index + 1, nullptr);
  Chunk*& chunk = chunks_[index];
  if (chunk == nullptr) {
    chunk = new Chunk{1, {}};
  } else if (chunk->references > 1) {
    Chunk* copy = new Chunk{1, {}};
    std::memcpy(copy->values, chunk->values, sizeof copy->values);
    --chunk->references;
    chunk = copy;
  }
  return chunk;
}

void VectorClock::Raise(uint32_t agent, uint32_t value) {
  if ((*this)[agent] >= value) return;
  Writable(agent / kChunk)->values[agent % kChunk] = value;
}

void VectorClock::Join(const VectorClock& other, uint32_t first_chunk) {
  if (other.chunks_.size() > chunks_.size()) chunks_.resize(other.chunks_.size(), nullptr);
  for (uint32_t i = first_chunk; i < other.chunks_.size(); ++i) {
    Chunk* theirs = other.chunks_[i];
    Chunk* ours = chunks_[i];
    if (theirs == nullptr || theirs == ours) continue;
    bool ours_adds = false, theirs_adds = false;
    if (ours != nullptr) {
      for (int k = 0; k < kChunk; ++k) {
        ours_adds |= ours->values[k] > theirs->values[k];
        theirs_adds |= theirs->values[k] > ours->values[k];
      }
      if (!theirs_adds) continue;
    }
    if (!ours_adds) {  // share
      ++theirs->references;
      Release(ours);
      chunks_[i] = theirs;
      continue;
    }
    uint32_t* values = Writable(i)->values;
    for (int k = 0; k < kChunk; ++k) values[k] = std::max(values[k], theirs->values[k]);
  }
}

void VectorClock::Meet(const VectorClock& other) {
  for (uint32_t i = 0; i < chunks_.size(); ++i) {
    Chunk* theirs = i < other.chunks_.size() ? other.chunks_[i] : nullptr;
    if (chunks_[i] == theirs || chunks_[i] == nullptr) continue;
    if (theirs == nullptr) {
      Release(chunks_[i]);
      chunks_[i] = nullptr;
      continue;
    }
    uint32_t* values = Writable(i)->values;
    for (int k = 0; k < kChunk; ++k) values[k] = std::min(values[k], theirs->values[k]);
  }
}

}  // namespace mok::emulator
