// Forward and backward: the C structs as Python objects whose pointer fields are addresses.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "mok_megakernel/mok.h"
#include "mok_torch/csrc/handles.h"
#include "mok_torch/csrc/structs.h"

namespace mok {

namespace py = pybind11;

namespace {

void BindTensors(py::module_& module) {
  py::class_<MokWeights> weights(module, "Weights");
  DefAddress<&MokWeights::gate>(weights, "gate");
  DefAddress<&MokWeights::up>(weights, "up");
  DefAddress<&MokWeights::down>(weights, "down");
  weights.def_readwrite("intermediate", &MokWeights::intermediate);

  py::class_<MokContext> context(module, "Context");
  context.def_readwrite("ring_rows", &MokContext::ring_rows);
  DefAddress<&MokContext::ring_x>(context, "ring_x");
  DefAddress<&MokContext::ring_gate>(context, "ring_gate");
  DefAddress<&MokContext::ring_up>(context, "ring_up");
  DefAddress<&MokContext::shared_gate>(context, "shared_gate");
  DefAddress<&MokContext::shared_up>(context, "shared_up");
  context.def("set", &SetContext, py::arg("ring_rows"), py::arg("addresses"));

  py::class_<MokLayer> layer(module, "Layer");
  DefAddress<&MokLayer::x>(layer, "x");
  DefAddress<&MokLayer::topk_weight>(layer, "topk_weight");
  DefAddress<&MokLayer::shared_scale>(layer, "shared_scale");
  layer.def_readonly("routed", &MokLayer::routed)
      .def_readonly("shared", &MokLayer::shared)
      .def_readwrite("swiglu_limit", &MokLayer::swiglu_limit)
      .def("set", &SetLayer, py::arg("addresses"), py::arg("intermediate"),
           py::arg("shared_intermediate"), py::arg("swiglu_limit"));

  py::class_<MokWeightGrads> grads(module, "WeightGrads");
  DefAddress<&MokWeightGrads::gate>(grads, "gate");
  DefAddress<&MokWeightGrads::up>(grads, "up");
  DefAddress<&MokWeightGrads::down>(grads, "down");
  grads.def_readwrite("dtype", &MokWeightGrads::dtype)
      .def_readwrite("accumulate", &MokWeightGrads::accumulate)
      .def("set", &SetGrads, py::arg("addresses"), py::arg("dtype"), py::arg("accumulate"));
}

void BindMatmul(py::module_& module) {
  py::class_<MokMatmulArgs> matmul(module, "MatmulArgs");
  matmul.def(py::init([] {
    auto args = MakeStruct<MokMatmulArgs>();
    args.isa = -1;
    return args;
  }));
  matmul.def_readwrite("layout", &MokMatmulArgs::layout)
      .def_readwrite("num_threads", &MokMatmulArgs::num_threads)
      .def_readwrite("m", &MokMatmulArgs::m)
      .def_readwrite("n", &MokMatmulArgs::n)
      .def_readwrite("k", &MokMatmulArgs::k);
  DefAddress<&MokMatmulArgs::a>(matmul, "a");
  DefAddress<&MokMatmulArgs::b>(matmul, "b");
  DefAddress<&MokMatmulArgs::c>(matmul, "c");
  module.attr("MATMUL_NT") = static_cast<int32_t>(MOK_MATMUL_NT);
  module.attr("MATMUL_NN") = static_cast<int32_t>(MOK_MATMUL_NN);
  module.attr("MATMUL_TN") = static_cast<int32_t>(MOK_MATMUL_TN);
  module.def(
      "matmul",
      [](const MokMatmulArgs& args) { CallWithoutGil([&] { return mok_matmul(&args); }); },
      py::arg("args"));
}

}  // namespace

void BindPasses(py::module_& module) {
  BindTensors(module);
  BindMatmul(module);

  py::class_<MokForwardArgs> forward(module, "ForwardArgs");
  forward.def(py::init(&MakeStruct<MokForwardArgs>))
      .def_readonly("layer", &MokForwardArgs::layer)
      .def_readonly("context", &MokForwardArgs::context)
      .def_readwrite("differentiated", &MokForwardArgs::differentiated)
      .def_readwrite("clear_spare_rows", &MokForwardArgs::clear_spare_rows);
  DefAddress<&MokForwardArgs::out>(forward, "out");

  py::class_<MokBackwardArgs> backward(module, "BackwardArgs");
  backward.def(py::init(&MakeStruct<MokBackwardArgs>))
      .def_readonly("layer", &MokBackwardArgs::layer)
      .def_readonly("context", &MokBackwardArgs::context)
      .def_readonly("d_routed", &MokBackwardArgs::d_routed)
      .def_readonly("d_shared", &MokBackwardArgs::d_shared)
      .def_readwrite("kept_macrobatches", &MokBackwardArgs::kept_macrobatches);
  DefAddress<&MokBackwardArgs::d_out>(backward, "d_out");
  DefAddress<&MokBackwardArgs::d_x>(backward, "d_x");
  DefAddress<&MokBackwardArgs::d_topk_weight>(backward, "d_topk_weight");
  DefAddress<&MokBackwardArgs::d_shared_scale>(backward, "d_shared_scale");

  module.def(
      "forward",
      [](const WorkspaceHandle& workspace, const MokEngineConfig& config,
         const ScheduleHandle& schedule, const MokForwardArgs& args) {
        CallWithoutGil(
            [&] { return mok_forward(workspace.get(), &config, schedule.get(), &args); });
      },
      py::arg("workspace"), py::arg("config"), py::arg("schedule"), py::arg("args"), "Collective.");
  module.def(
      "backward",
      [](const WorkspaceHandle& workspace, const MokEngineConfig& config,
         const ScheduleHandle& schedule, const MokBackwardArgs& args) {
        CallWithoutGil(
            [&] { return mok_backward(workspace.get(), &config, schedule.get(), &args); });
      },
      py::arg("workspace"), py::arg("config"), py::arg("schedule"), py::arg("args"), "Collective.");
}

}  // namespace mok
