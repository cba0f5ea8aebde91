// The extension module mok_torch._C.
#include <pybind11/pybind11.h>

#include "mok_megakernel/mok.h"
#include "mok_torch/csrc/bindings.h"

namespace mok {
namespace {

namespace py = pybind11;

py::tuple IsaNames() {
  py::tuple names(static_cast<size_t>(MOK_NUM_ISAS));
  for (int32_t isa = 0; isa < MOK_NUM_ISAS; ++isa) names[isa] = mok_isa_name(isa);
  return names;
}

}  // namespace

void BindMachine(py::module_& module) {
  module.attr("API_VERSION") = mok_api_version();
  module.attr("ISA_NAMES") = IsaNames();
  module.attr("MAX_RANKS") = static_cast<int32_t>(MOK_MAX_RANKS);
  module.attr("INVALID_ARGUMENT") = static_cast<int32_t>(MOK_INVALID_ARGUMENT);
  module.attr("TYPE_MISMATCH") = static_cast<int32_t>(MOK_TYPE_MISMATCH);
  module.attr("RESOURCE_EXHAUSTED") = static_cast<int32_t>(MOK_RESOURCE_EXHAUSTED);
  module.attr("UNIMPLEMENTED") = static_cast<int32_t>(MOK_UNIMPLEMENTED);
  module.attr("INTERNAL") = static_cast<int32_t>(MOK_INTERNAL);
  module.attr("OP_SCHEDULE") = static_cast<int32_t>(MOK_OP_SCHEDULE);
  module.attr("OP_FORWARD") = static_cast<int32_t>(MOK_OP_FORWARD);
  module.attr("OP_BACKWARD") = static_cast<int32_t>(MOK_OP_BACKWARD);
  module.attr("BF16") = static_cast<int32_t>(MOK_BF16);
  module.attr("FP32") = static_cast<int32_t>(MOK_FP32);
  module.def("isa_supported", [](int32_t isa) { return mok_isa_supported(isa) != 0; });
  module.def("best_isa", &mok_best_isa);
  module.def("num_cores", &mok_num_cores);
}

}  // namespace mok

PYBIND11_MODULE(_C, module) {
  module.doc() = "The engine of MoK: addresses and sizes. Use mok_torch's Python modules instead.";
  mok::BindMachine(module);
  mok::BindMemory(module);
  mok::BindConfig(module);
  mok::BindWorkspace(module);
  mok::BindSchedule(module);
  mok::BindPasses(module);
#if defined(MOK_WITH_CUDA)
  mok::BindCuda(module);
  module.attr("CUDA_BUILT") = true;
#else
  module.attr("CUDA_BUILT") = false;
#endif
}
