// The engine on CUDA devices (mok_megakernel/mok_cuda.h). Compiled only where there is a toolkit.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <utility>
#include <vector>

#include "mok_megakernel/mok_cuda.h"
#include "mok_torch/csrc/handles.h"

namespace mok {

namespace py = pybind11;

namespace {

using CudaWorkspaceHandle = Handle<MokCudaWorkspace, mok_cuda_workspace_destroy>;

template <class Struct>
Struct MakeStruct() {
  Struct value{};
  value.struct_size = sizeof(value);
  return value;
}

void BindCudaSizes(py::module_& module) {
  py::class_<MokCudaOptions>(module, "CudaOptions")
      .def(py::init(&MakeStruct<MokCudaOptions>))
      .def_readwrite("rank", &MokCudaOptions::rank)
      .def_readwrite("ep_size", &MokCudaOptions::ep_size)
      .def_readwrite("max_tokens", &MokCudaOptions::max_tokens)
      .def_readwrite("hidden", &MokCudaOptions::hidden)
      .def_readwrite("topk", &MokCudaOptions::topk)
      .def_readwrite("device", &MokCudaOptions::device)
      .def_readwrite("num_sms", &MokCudaOptions::num_sms)
      .def_readwrite("timeout_seconds", &MokCudaOptions::timeout_seconds);

  py::class_<MokCudaMemory>(module, "CudaMemory")
      .def_readonly("heap_bytes", &MokCudaMemory::heap_bytes)
      .def_readonly("heap_zero_bytes", &MokCudaMemory::heap_zero_bytes)
      .def_readonly("state_bytes", &MokCudaMemory::state_bytes)
      .def_readonly("record_bytes", &MokCudaMemory::record_bytes)
      .def_readonly("x_offset", &MokCudaMemory::x_offset)
      .def_readonly("error_scratch_bytes", &MokCudaMemory::error_scratch_bytes);
  module.def(
      "cuda_memory",
      [](const MokCudaOptions& options) {
        auto memory = MakeStruct<MokCudaMemory>();
        RaiseIfError(mok_cuda_memory(&options, &memory));
        return memory;
      },
      py::arg("options"));

  py::class_<MokCudaLayer>(module, "CudaLayer")
      .def(py::init(&MakeStruct<MokCudaLayer>))
      .def_readwrite("num_local_experts", &MokCudaLayer::num_local_experts)
      .def_readwrite("first_expert", &MokCudaLayer::first_expert)
      .def_readwrite("num_experts", &MokCudaLayer::num_experts)
      .def_readwrite("intermediate", &MokCudaLayer::intermediate)
      .def_readwrite("shared_intermediate", &MokCudaLayer::shared_intermediate)
      .def_readwrite("num_comm_sms", &MokCudaLayer::num_comm_sms)
      .def_readwrite("num_tokens", &MokCudaLayer::num_tokens)
      .def_readwrite("minibatch_rows", &MokCudaLayer::minibatch_rows)
      .def_readwrite("macrobatch_rows", &MokCudaLayer::macrobatch_rows)
      .def_readwrite("num_sms", &MokCudaLayer::num_sms);

  py::class_<MokCudaLayerMemory>(module, "CudaLayerMemory")
      .def_readonly("ring_rows", &MokCudaLayerMemory::ring_rows)
      .def_readonly("schedule_bytes", &MokCudaLayerMemory::schedule_bytes)
      .def_readonly("schedule_scratch_bytes", &MokCudaLayerMemory::schedule_scratch_bytes)
      .def_readonly("forward_scratch_bytes", &MokCudaLayerMemory::forward_scratch_bytes)
      .def_readonly("backward_scratch_bytes", &MokCudaLayerMemory::backward_scratch_bytes)
      .def_readonly("result_offset", &MokCudaLayerMemory::result_offset)
      .def_readonly("expert_rows_offset", &MokCudaLayerMemory::expert_rows_offset);
  module.attr("CUDA_SCHEDULE_HEADER_WORDS") = static_cast<int>(MOK_CUDA_SCHEDULE_HEADER_WORDS);
  module.attr("CUDA_WHOLE") = static_cast<int32_t>(MOK_CUDA_WHOLE);
  module.attr("CUDA_STAGE") = static_cast<int32_t>(MOK_CUDA_STAGE);
  module.attr("CUDA_BUILD") = static_cast<int32_t>(MOK_CUDA_BUILD);
  module.attr("CUDA_EXCHANGE") = static_cast<int32_t>(MOK_CUDA_EXCHANGE);
  module.attr("CUDA_REDUCE") = static_cast<int32_t>(MOK_CUDA_REDUCE);
  module.attr("CUDA_IN_SCHEDULE") = static_cast<int32_t>(MOK_CUDA_IN_SCHEDULE);
  module.attr("CUDA_IN_PASS") = static_cast<int32_t>(MOK_CUDA_IN_PASS);
}

// What a call is queued with: the same fields of each of its structs.
template <class Args>
void SetQueue(Args& args, uintptr_t scratch, uintptr_t stream, int32_t part) {
  args.scratch = reinterpret_cast<void*>(scratch);
  args.stream = reinterpret_cast<void*>(stream);
  args.part = part;
}

template <class Args>
void SetRouting(Args& args, uintptr_t topk_idx, int32_t topk_idx_bytes) {
  args.topk_idx = reinterpret_cast<const void*>(topk_idx);
  args.topk_idx_bytes = topk_idx_bytes;
}

void SetScheduleCall(MokCudaScheduleArgs& args, uintptr_t topk_idx, int32_t topk_idx_bytes,
                     uintptr_t schedule) {
  SetRouting(args, topk_idx, topk_idx_bytes);
  args.schedule = reinterpret_cast<void*>(schedule);
}

void SetForwardCall(MokCudaForwardArgs& args, uintptr_t topk_idx, int32_t topk_idx_bytes,
                    uintptr_t schedule, uintptr_t out) {
  SetRouting(args, topk_idx, topk_idx_bytes);
  args.schedule = reinterpret_cast<const void*>(schedule);
  args.out = reinterpret_cast<void*>(out);
}

// outputs: d_x, d_topk_weight, d_shared_scale.
void SetBackwardCall(MokCudaBackwardArgs& args, uintptr_t topk_idx, int32_t topk_idx_bytes,
                     uintptr_t schedule, uintptr_t d_out, int32_t kept_macrobatches,
                     const std::array<uintptr_t, 3>& outputs) {
  SetRouting(args, topk_idx, topk_idx_bytes);
  args.schedule = reinterpret_cast<const void*>(schedule);
  args.d_out = reinterpret_cast<const void*>(d_out);
  args.kept_macrobatches = kept_macrobatches;
  args.d_x = reinterpret_cast<void*>(outputs[0]);
  args.d_topk_weight = reinterpret_cast<float*>(outputs[1]);
  args.d_shared_scale = reinterpret_cast<float*>(outputs[2]);
}

void BindCudaArgs(py::module_& module) {
  py::class_<MokCudaScheduleArgs> schedule(module, "CudaScheduleArgs");
  schedule.def(py::init(&MakeStruct<MokCudaScheduleArgs>))
      .def_readwrite("topk_idx_bytes", &MokCudaScheduleArgs::topk_idx_bytes)
      .def_readwrite("part", &MokCudaScheduleArgs::part)
      .def("set_call", &SetScheduleCall, py::arg("topk_idx"), py::arg("topk_idx_bytes"),
           py::arg("schedule"))
      .def("set_queue", &SetQueue<MokCudaScheduleArgs>, py::arg("scratch"), py::arg("stream"),
           py::arg("part"));
  DefAddress<&MokCudaScheduleArgs::topk_idx>(schedule, "topk_idx");
  DefAddress<&MokCudaScheduleArgs::schedule>(schedule, "schedule");
  DefAddress<&MokCudaScheduleArgs::scratch>(schedule, "scratch");
  DefAddress<&MokCudaScheduleArgs::stream>(schedule, "stream");

  py::class_<MokCudaForwardArgs> forward(module, "CudaForwardArgs");
  forward.def(py::init(&MakeStruct<MokCudaForwardArgs>))
      .def_readonly("layer", &MokCudaForwardArgs::layer)
      .def_readonly("context", &MokCudaForwardArgs::context)
      .def_readwrite("topk_idx_bytes", &MokCudaForwardArgs::topk_idx_bytes)
      .def_readwrite("part", &MokCudaForwardArgs::part)
      .def("set_call", &SetForwardCall, py::arg("topk_idx"), py::arg("topk_idx_bytes"),
           py::arg("schedule"), py::arg("out"))
      .def("set_queue", &SetQueue<MokCudaForwardArgs>, py::arg("scratch"), py::arg("stream"),
           py::arg("part"));
  DefAddress<&MokCudaForwardArgs::topk_idx>(forward, "topk_idx");
  DefAddress<&MokCudaForwardArgs::schedule>(forward, "schedule");
  DefAddress<&MokCudaForwardArgs::scratch>(forward, "scratch");
  DefAddress<&MokCudaForwardArgs::out>(forward, "out");
  DefAddress<&MokCudaForwardArgs::stream>(forward, "stream");
}

void BindCudaBackward(py::module_& module) {
  py::class_<MokCudaBackwardArgs> backward(module, "CudaBackwardArgs");
  backward.def(py::init(&MakeStruct<MokCudaBackwardArgs>))
      .def_readonly("layer", &MokCudaBackwardArgs::layer)
      .def_readonly("context", &MokCudaBackwardArgs::context)
      .def_readonly("d_routed", &MokCudaBackwardArgs::d_routed)
      .def_readonly("d_shared", &MokCudaBackwardArgs::d_shared)
      .def_readwrite("topk_idx_bytes", &MokCudaBackwardArgs::topk_idx_bytes)
      .def_readwrite("part", &MokCudaBackwardArgs::part)
      .def_readwrite("kept_macrobatches", &MokCudaBackwardArgs::kept_macrobatches)
      .def("set_call", &SetBackwardCall, py::arg("topk_idx"), py::arg("topk_idx_bytes"),
           py::arg("schedule"), py::arg("d_out"), py::arg("kept_macrobatches"), py::arg("outputs"))
      .def("set_queue", &SetQueue<MokCudaBackwardArgs>, py::arg("scratch"), py::arg("stream"),
           py::arg("part"));
  DefAddress<&MokCudaBackwardArgs::topk_idx>(backward, "topk_idx");
  DefAddress<&MokCudaBackwardArgs::schedule>(backward, "schedule");
  DefAddress<&MokCudaBackwardArgs::scratch>(backward, "scratch");
  DefAddress<&MokCudaBackwardArgs::stream>(backward, "stream");
  DefAddress<&MokCudaBackwardArgs::d_out>(backward, "d_out");
  DefAddress<&MokCudaBackwardArgs::d_x>(backward, "d_x");
  DefAddress<&MokCudaBackwardArgs::d_topk_weight>(backward, "d_topk_weight");
  DefAddress<&MokCudaBackwardArgs::d_shared_scale>(backward, "d_shared_scale");
}

void BindCudaErrors(py::module_& module) {
  py::class_<MokCudaErrorArgs> error(module, "CudaErrorArgs");
  error.def(py::init(&MakeStruct<MokCudaErrorArgs>))
      .def_readwrite("code", &MokCudaErrorArgs::code)
      .def_readwrite("place", &MokCudaErrorArgs::place);
  DefAddress<&MokCudaErrorArgs::scratch>(error, "scratch");
  DefAddress<&MokCudaErrorArgs::stream>(error, "stream");
}

CudaWorkspaceHandle CreateCudaWorkspace(const MokCudaOptions& options,
                                        const std::vector<uintptr_t>& heap_of_rank, uintptr_t state,
                                        uintptr_t records) {
  std::vector<void*> heaps;
  for (const uintptr_t heap : heap_of_rank) heaps.push_back(reinterpret_cast<void*>(heap));
  if (heaps.size() != static_cast<size_t>(options.ep_size)) {
    throw py::value_error("heap_of_rank: expected one address per rank");
  }
  auto addresses = MakeStruct<MokCudaAddresses>();
  addresses.heap_of_rank = heaps.data();
  addresses.state = reinterpret_cast<void*>(state);
  addresses.records = reinterpret_cast<void*>(records);
  MokCudaWorkspace* workspace = nullptr;
  CallWithoutGil([&] { return mok_cuda_workspace_create(&options, &addresses, &workspace); });
  return CudaWorkspaceHandle(workspace);
}

}  // namespace

// Calls only queue work, so most of them keep the GIL: releasing it would cost as much.
void BindCuda(py::module_& module) {
  BindCudaSizes(module);
  BindCudaArgs(module);
  BindCudaBackward(module);
  BindCudaErrors(module);
  py::class_<CudaWorkspaceHandle>(module, "CudaWorkspace")
      .def(py::init(&CreateCudaWorkspace), py::arg("options"), py::arg("heap_of_rank"),
           py::arg("state"), py::arg("records"))
      .def(
          "check",
          [](const CudaWorkspaceHandle& self, uintptr_t stream) {
            RaiseIfError(mok_cuda_check(self.get(), reinterpret_cast<void*>(stream)));
          },
          py::arg("stream"))
      .def("check_ranks",
           [](const CudaWorkspaceHandle& self) {
             CallWithoutGil([&] { return mok_cuda_check_ranks(self.get()); });
           })
      .def("check_usable",
           [](const CudaWorkspaceHandle& self) { RaiseIfError(mok_cuda_check_usable(self.get())); })
      .def(
          "layer_memory",
          [](const CudaWorkspaceHandle& self, const MokCudaLayer& layer) {
            auto memory = MakeStruct<MokCudaLayerMemory>();
            RaiseIfError(mok_cuda_layer_memory(self.get(), &layer, &memory));
            return memory;
          },
          py::arg("layer"))
      .def(
          "build_schedule",
          [](const CudaWorkspaceHandle& self, const MokCudaLayer& layer,
             const MokCudaScheduleArgs& args) {
            RaiseIfError(mok_cuda_schedule_build(self.get(), &layer, &args));
          },
          py::arg("layer"), py::arg("args"), "Collective.")
      .def(
          "forward",
          [](const CudaWorkspaceHandle& self, const MokCudaLayer& layer,
             const MokCudaForwardArgs& args) {
            RaiseIfError(mok_cuda_forward(self.get(), &layer, &args));
          },
          py::arg("layer"), py::arg("args"), "Collective.")
      .def(
          "backward",
          [](const CudaWorkspaceHandle& self, const MokCudaLayer& layer,
             const MokCudaBackwardArgs& args) {
            RaiseIfError(mok_cuda_backward(self.get(), &layer, &args));
          },
          py::arg("layer"), py::arg("args"), "Collective.")
      .def(
          "report_error",
          [](const CudaWorkspaceHandle& self, const MokCudaErrorArgs& args) {
            RaiseIfError(mok_cuda_report_error(self.get(), &args));
          },
          py::arg("args"), "In place of build_schedule, and of forward if args say so.");
  module.def(
      "cuda_matmul",
      [](const MokMatmulArgs& args, int32_t device, uintptr_t stream) {
        RaiseIfError(mok_cuda_matmul(&args, device, reinterpret_cast<void*>(stream)));
      },
      py::arg("args"), py::arg("device"), py::arg("stream"));
}

}  // namespace mok
