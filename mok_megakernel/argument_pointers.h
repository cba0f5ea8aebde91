// Test only: the pointers among the arguments of the C APIs' calls, by the names that errors give
// them, and calls with one of them moved.
#pragma once

#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "mok_megakernel/mok.h"

namespace mok::testing {

struct Pointer {
  template <class T>
  Pointer(const char* pointer_name, T*& pointer)
      : name(pointer_name),
        place(reinterpret_cast<void**>(const_cast<std::remove_const_t<T>**>(&pointer))) {}

  std::string name;
  void** place;
};

// Args: of a forward or a backward, on the host or on a GPU. All inputs of both that may not be
// null where there are tokens, experts and a shared expert.
template <class Args>
std::vector<Pointer> InputsOf(Args& args) {
  return {{"x", args.layer.x},
          {"topk_weight", args.layer.topk_weight},
          {"routed.gate", args.layer.routed.gate},
          {"routed.up", args.layer.routed.up},
          {"routed.down", args.layer.routed.down},
          {"shared.gate", args.layer.shared.gate},
          {"shared.up", args.layer.shared.up},
          {"shared.down", args.layer.shared.down}};
}

template <class Args>
std::vector<Pointer> ContextOf(Args& args) {
  return {{"context.ring_x", args.context.ring_x},
          {"context.ring_gate", args.context.ring_gate},
          {"context.ring_up", args.context.ring_up},
          {"context.shared_gate", args.context.shared_gate},
          {"context.shared_up", args.context.shared_up}};
}

// Of a backward: what it writes besides the context.
template <class Args>
std::vector<Pointer> GradientsOf(Args& args) {
  return {{"d_x", args.d_x},
          {"d_topk_weight", args.d_topk_weight},
          {"d_shared_scale", args.d_shared_scale},
          {"d_routed.gate", args.d_routed.gate},
          {"d_routed.up", args.d_routed.up},
          {"d_routed.down", args.d_routed.down},
          {"d_shared.gate", args.d_shared.gate},
          {"d_shared.up", args.d_shared.up},
          {"d_shared.down", args.d_shared.down}};
}

using Call = std::function<int32_t()>;

// The call, with the pointer moved to `address`, is MOK_INVALID_ARGUMENT; its text contains `text`.
void ExpectRefused(const Call& call, const Pointer& pointer, void* address,
                   const std::string& text);

// The call is refused with each of `written` at the beginning of any other tensor.
void ExpectApart(const Call& call, const std::vector<Pointer>& written,
                 const std::vector<Pointer>& read);

}  // namespace mok::testing
