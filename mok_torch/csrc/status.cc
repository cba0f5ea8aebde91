// MokStatusCode to Python exceptions.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "mok_megakernel/mok.h"
#include "mok_torch/csrc/bindings.h"

namespace mok {
namespace {

namespace py = pybind11;

[[noreturn]] void RaiseMokError(const char* class_name, const std::string& text) {
  const py::object type = py::module_::import("mok_torch.errors").attr(class_name);
  PyErr_SetString(type.ptr(), text.c_str());
  throw py::error_already_set();
}

}  // namespace

void RaiseIfError(int32_t code) {
  if (code == MOK_OK) return;
  const std::string text = mok_last_error();
  switch (code) {
    case MOK_INVALID_ARGUMENT:
    case MOK_OUT_OF_RANGE:
      throw py::value_error(text);
    case MOK_TYPE_MISMATCH:
      throw py::type_error(text);
    case MOK_UNIMPLEMENTED:
      PyErr_SetString(PyExc_NotImplementedError, text.c_str());
      throw py::error_already_set();
    case MOK_DEADLINE_EXCEEDED:
      RaiseMokError("RankTimeoutError", text);
    case MOK_RESOURCE_EXHAUSTED:
      RaiseMokError("ResourceExhaustedError", text);
    default:
      throw std::runtime_error(text);
  }
}

}  // namespace mok
