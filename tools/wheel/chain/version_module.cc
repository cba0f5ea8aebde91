#include <pybind11/pybind11.h>

#include <string>

PYBIND11_MODULE(_version, module) {
  module.def("python_version", [] {
    return std::to_string(PY_MAJOR_VERSION) + "." + std::to_string(PY_MINOR_VERSION);
  });
}
