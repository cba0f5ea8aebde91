// Whole structs of the C API set in one call each: an attribute costs a call's host time as much.
#ifndef MOK_TORCH_CSRC_STRUCTS_H_
#define MOK_TORCH_CSRC_STRUCTS_H_

#include <array>
#include <cstdint>

#include "mok_megakernel/mok.h"

namespace mok {

template <class T>
T* Pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// A struct as the C API expects it before its fields are set.
template <class Struct>
Struct MakeStruct() {
  Struct value{};
  value.struct_size = sizeof(value);
  return value;
}

// Addresses in the order of mok_torch.checks.LayerTensors.
inline void SetLayer(MokLayer& layer, const std::array<uintptr_t, 9>& addresses,
                     int32_t intermediate, int32_t shared_intermediate, float swiglu_limit) {
  layer.x = Pointer<const void>(addresses[0]);
  layer.topk_weight = Pointer<const float>(addresses[1]);
  layer.routed = {Pointer<const void>(addresses[2]), Pointer<const void>(addresses[3]),
                  Pointer<const void>(addresses[4]), intermediate};
  layer.shared = {Pointer<const void>(addresses[5]), Pointer<const void>(addresses[6]),
                  Pointer<const void>(addresses[7]), shared_intermediate};
  layer.shared_scale = Pointer<const float>(addresses[8]);
  layer.swiglu_limit = swiglu_limit;
}

// Addresses in the order of mok_torch.ring.Ring.
inline void SetContext(MokContext& context, int64_t ring_rows,
                       const std::array<uintptr_t, 5>& addresses) {
  context.ring_rows = ring_rows;
  context.ring_x = Pointer<void>(addresses[0]);
  context.ring_gate = Pointer<void>(addresses[1]);
  context.ring_up = Pointer<void>(addresses[2]);
  context.shared_gate = Pointer<void>(addresses[3]);
  context.shared_up = Pointer<void>(addresses[4]);
}

// Addresses of the gradients of gate, up and down.
inline void SetGrads(MokWeightGrads& grads, const std::array<uintptr_t, 3>& addresses,
                     int32_t dtype, bool accumulate) {
  grads.gate = Pointer<void>(addresses[0]);
  grads.up = Pointer<void>(addresses[1]);
  grads.down = Pointer<void>(addresses[2]);
  grads.dtype = dtype;
  grads.accumulate = accumulate ? 1 : 0;
}

}  // namespace mok

#endif  // MOK_TORCH_CSRC_STRUCTS_H_
