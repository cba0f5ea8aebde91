// Parts of the extension module mok_torch._C, the Python face of mok_megakernel/mok.h.
//
// The module knows addresses and sizes only: no PyTorch, so one binary serves every version of it.
// mok_torch's Python modules check shapes and dtypes and keep the memory alive.
#ifndef MOK_TORCH_CSRC_BINDINGS_H_
#define MOK_TORCH_CSRC_BINDINGS_H_

#include <pybind11/pybind11.h>

#include <cstdint>
#include <type_traits>
#include <utility>

namespace mok {

// Raises the Python exception of a MokStatusCode, with the text of mok_last_error(); returns on
// MOK_OK. Wrong arguments are ValueError or TypeError; the others are in mok_torch/errors.py.
// Call it with the GIL, in the thread that got the code.
void RaiseIfError(int32_t code);

// Calls function(), which returns a MokStatusCode, without the GIL, then RaiseIfError. Every C call
// that may wait for another rank, for a lock or for much computation goes through here, because the
// rank it waits for may be a thread of this process.
template <class Function>
void CallWithoutGil(Function&& function) {
  int32_t code;
  {
    pybind11::gil_scoped_release release;
    code = function();
  }
  RaiseIfError(code);
}

// A pointer field of a C struct as an integer attribute: 0 is null.
template <auto Member, class Class>
void DefAddress(Class& cls, const char* name) {
  using Struct = typename Class::type;
  using Pointer = std::remove_reference_t<decltype(std::declval<Struct&>().*Member)>;
  cls.def_property(
      name, [](const Struct& self) { return reinterpret_cast<uintptr_t>(self.*Member); },
      [](Struct& self, uintptr_t address) { self.*Member = reinterpret_cast<Pointer>(address); });
}

void BindMachine(pybind11::module_& module);
void BindMemory(pybind11::module_& module);
void BindConfig(pybind11::module_& module);
void BindWorkspace(pybind11::module_& module);
void BindSchedule(pybind11::module_& module);
void BindPasses(pybind11::module_& module);
void BindCuda(pybind11::module_& module);  // in a build with CUDA

}  // namespace mok

#endif  // MOK_TORCH_CSRC_BINDINGS_H_
