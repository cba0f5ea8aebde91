// Twin of mok_core/ptx/tensor_copy.h.
#pragma once

#include "mok_core/emulator/twins/ids.h"

namespace mok {

MOK_DEVICE void PrefetchTensorMap(const TensorMap* map) { emulator::PrefetchTensorMap(map); }
MOK_DEVICE void TensorLoad2d(void* shared, const TensorMap* map, uint64_t* barrier, int c0,
                             int c1) {
  const int coordinates[] = {c0, c1};
  emulator::TensorLoad(SharedAddress(shared), map, SharedAddress(barrier), coordinates, 2, 0);
}
MOK_DEVICE void TensorLoad3d(void* shared, const TensorMap* map, uint64_t* barrier, int c0, int c1,
                             int c2) {
  const int coordinates[] = {c0, c1, c2};
  emulator::TensorLoad(SharedAddress(shared), map, SharedAddress(barrier), coordinates, 3, 0);
}
MOK_DEVICE void TensorLoad4d(void* shared, const TensorMap* map, uint64_t* barrier, int c0, int c1,
                             int c2, int c3) {
  const int coordinates[] = {c0, c1, c2, c3};
  emulator::TensorLoad(SharedAddress(shared), map, SharedAddress(barrier), coordinates, 4, 0);
}
MOK_DEVICE void TensorLoad5d(void* shared, const TensorMap* map, uint64_t* barrier, int c0, int c1,
                             int c2, int c3, int c4) {
  const int coordinates[] = {c0, c1, c2, c3, c4};
  emulator::TensorLoad(SharedAddress(shared), map, SharedAddress(barrier), coordinates, 5, 0);
}
MOK_DEVICE void TensorLoad2dMulticast(void* shared, const TensorMap* map, uint64_t* barrier,
                                      uint16_t cta_mask, int c0, int c1) {
  const int coordinates[] = {c0, c1};
  emulator::TensorLoad(SharedAddress(shared), map, SharedAddress(barrier), coordinates, 2,
                       cta_mask);
}
MOK_DEVICE void TensorLoad3dMulticast(void* shared, const TensorMap* map, uint64_t* barrier,
                                      uint16_t cta_mask, int c0, int c1, int c2) {
  const int coordinates[] = {c0, c1, c2};
  emulator::TensorLoad(SharedAddress(shared), map, SharedAddress(barrier), coordinates, 3,
                       cta_mask);
}
MOK_DEVICE void TensorLoad4dMulticast(void* shared, const TensorMap* map, uint64_t* barrier,
                                      uint16_t cta_mask, int c0, int c1, int c2, int c3) {
  const int coordinates[] = {c0, c1, c2, c3};
  emulator::TensorLoad(SharedAddress(shared), map, SharedAddress(barrier), coordinates, 4,
                       cta_mask);
}
MOK_DEVICE void TensorLoad5dMulticast(void* shared, const TensorMap* map, uint64_t* barrier,
                                      uint16_t cta_mask, int c0, int c1, int c2, int c3, int c4) {
  const int coordinates[] = {c0, c1, c2, c3, c4};
  emulator::TensorLoad(SharedAddress(shared), map, SharedAddress(barrier), coordinates, 5,
                       cta_mask);
}
MOK_DEVICE void TensorStore2d(const TensorMap* map, const void* shared, int c0, int c1) {
  const int coordinates[] = {c0, c1};
  emulator::TensorStore(map, SharedAddress(shared), coordinates, 2);
}
MOK_DEVICE void TensorStore3d(const TensorMap* map, const void* shared, int c0, int c1, int c2) {
  const int coordinates[] = {c0, c1, c2};
  emulator::TensorStore(map, SharedAddress(shared), coordinates, 3);
}
MOK_DEVICE void TensorPrefetch2d(const TensorMap* map, int /*c0*/, int /*c1*/) {
  emulator::PrefetchTensorMap(map);
}

}  // namespace mok
