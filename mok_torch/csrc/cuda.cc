// The engine on CUDA devices (mok_megakernel/mok_cuda.h). Compiled only where there is a toolkit.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <tuple>
#include <utility>
#include <vector>

#include "mok_megakernel/mok_cuda.h"
#include "mok_torch/csrc/handles.h"
#include "mok_torch/csrc/structs.h"

namespace mok {

namespace py = pybind11;

namespace {

using CudaWorkspaceHandle = Handle<MokCudaWorkspace, mok_cuda_workspace_destroy>;

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

// Addresses of expert ids [T, K], the bytes of one id, and the address of the schedule.
using Routing = std::tuple<uintptr_t, int32_t, uintptr_t>;

// What a call is queued with: the address of its scratch, the stream, a MokCudaPart.
using Queue = std::tuple<uintptr_t, uintptr_t, int32_t>;

// Addresses of the gradients of gate, up and down, the code of their dtype, whether they are added
// to.
using Grads = std::tuple<std::array<uintptr_t, 3>, int32_t, bool>;

// What a backward has beside a forward's tensors: the address of d_out, kept_macrobatches, the
// addresses of d_x, d_topk_weight and d_shared_scale, and routed and shared gradients.
using BackwardOperands = std::tuple<uintptr_t, int32_t, std::array<uintptr_t, 3>, Grads, Grads>;

template <class Args>
void SetCall(Args& args, const Routing& routing, const Queue& queue) {
  const auto& [topk_idx, topk_idx_bytes, schedule] = routing;
  args.topk_idx = Pointer<const void>(topk_idx);
  args.topk_idx_bytes = topk_idx_bytes;
  args.schedule = Pointer<void>(schedule);
  const auto& [scratch, stream, part] = queue;
  args.scratch = Pointer<void>(scratch);
  args.stream = Pointer<void>(stream);
  args.part = part;
}

MokCudaScheduleArgs ScheduleArgs(const Routing& routing, const Queue& queue) {
  auto args = MakeStruct<MokCudaScheduleArgs>();
  SetCall(args, routing, queue);
  return args;
}

// What passes of equal shapes have in common. A call brings the addresses.
class CudaPass {
 public:
  CudaPass(const MokCudaLayer& layer, float swiglu_limit)
      : layer_(layer), swiglu_limit_(swiglu_limit) {}

  // begins: bytes from the address of the ring to each of its tensors, -1 for one without any.
  void SetRing(int64_t rows, const std::array<int64_t, 5>& begins) {
    ring_rows_ = rows;
    ring_begins_ = begins;
  }

  const MokCudaLayer& layer() const { return layer_; }

  // inputs: addresses as SetLayer takes them.
  MokCudaForwardArgs ForwardArgs(const std::array<uintptr_t, 9>& inputs, uintptr_t ring,
                                 const Routing& routing, uintptr_t out, const Queue& queue) const {
    auto args = MakeStruct<MokCudaForwardArgs>();
    SetTensors(args, inputs, ring);
    SetCall(args, routing, queue);
    args.out = Pointer<void>(out);
    return args;
  }

  MokCudaBackwardArgs BackwardArgs(const std::array<uintptr_t, 9>& inputs, uintptr_t ring,
                                   const Routing& routing, const BackwardOperands& operands,
                                   const Queue& queue) const {
    auto args = MakeStruct<MokCudaBackwardArgs>();
    SetTensors(args, inputs, ring);
    SetCall(args, routing, queue);
    const auto& [d_out, kept_macrobatches, outputs, routed, shared] = operands;
    args.d_out = Pointer<const void>(d_out);
    args.kept_macrobatches = kept_macrobatches;
    args.d_x = Pointer<void>(outputs[0]);
    args.d_topk_weight = Pointer<float>(outputs[1]);
    args.d_shared_scale = Pointer<float>(outputs[2]);
    std::apply([&](auto&... of) { SetGrads(args.d_routed, of...); }, routed);
    std::apply([&](auto&... of) { SetGrads(args.d_shared, of...); }, shared);
    return args;
  }

 private:
  template <class Args>
  void SetTensors(Args& args, const std::array<uintptr_t, 9>& inputs, uintptr_t ring) const {
    SetLayer(args.layer, inputs, layer_.intermediate, layer_.shared_intermediate, swiglu_limit_);
    std::array<uintptr_t, 5> tensors;
    for (size_t i = 0; i < tensors.size(); ++i) {
      tensors[i] = ring_begins_[i] < 0 ? 0 : ring + static_cast<uintptr_t>(ring_begins_[i]);
    }
    SetContext(args.context, ring_rows_, tensors);
  }

  MokCudaLayer layer_;
  float swiglu_limit_;
  int64_t ring_rows_ = 0;
  std::array<int64_t, 5> ring_begins_ = {-1, -1, -1, -1, -1};
};

// What a call hands to the C API: for tests, which look at its fields.
template <class Args>
py::class_<Args> BindArgs(py::module_& module, const char* name) {
  py::class_<Args> args(module, name);
  args.def_readonly("topk_idx_bytes", &Args::topk_idx_bytes).def_readonly("part", &Args::part);
  DefAddress<&Args::topk_idx>(args, "topk_idx");
  DefAddress<&Args::schedule>(args, "schedule");
  DefAddress<&Args::scratch>(args, "scratch");
  DefAddress<&Args::stream>(args, "stream");
  return args;
}

void BindCudaArgs(py::module_& module) {
  BindArgs<MokCudaScheduleArgs>(module, "CudaScheduleArgs")
      .def(py::init(&ScheduleArgs), py::arg("routing"), py::arg("queue"));

  auto forward = BindArgs<MokCudaForwardArgs>(module, "CudaForwardArgs");
  forward.def_readonly("layer", &MokCudaForwardArgs::layer)
      .def_readonly("context", &MokCudaForwardArgs::context);
  DefAddress<&MokCudaForwardArgs::out>(forward, "out");

  auto backward = BindArgs<MokCudaBackwardArgs>(module, "CudaBackwardArgs");
  backward.def_readonly("layer", &MokCudaBackwardArgs::layer)
      .def_readonly("context", &MokCudaBackwardArgs::context)
      .def_readonly("d_routed", &MokCudaBackwardArgs::d_routed)
      .def_readonly("d_shared", &MokCudaBackwardArgs::d_shared)
      .def_readonly("kept_macrobatches", &MokCudaBackwardArgs::kept_macrobatches);
  DefAddress<&MokCudaBackwardArgs::d_out>(backward, "d_out");
  DefAddress<&MokCudaBackwardArgs::d_x>(backward, "d_x");
  DefAddress<&MokCudaBackwardArgs::d_topk_weight>(backward, "d_topk_weight");
  DefAddress<&MokCudaBackwardArgs::d_shared_scale>(backward, "d_shared_scale");

  py::class_<CudaPass>(module, "CudaPass")
      .def(py::init<const MokCudaLayer&, float>(), py::arg("layer"), py::arg("swiglu_limit"))
      .def_property_readonly("layer", &CudaPass::layer)
      .def("set_ring", &CudaPass::SetRing, py::arg("rows"), py::arg("begins"))
      .def("forward_args", &CudaPass::ForwardArgs, py::arg("inputs"), py::arg("ring"),
           py::arg("routing"), py::arg("out"), py::arg("queue"))
      .def("backward_args", &CudaPass::BackwardArgs, py::arg("inputs"), py::arg("ring"),
           py::arg("routing"), py::arg("operands"), py::arg("queue"));
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

// Calls that only look something up keep the GIL. Launches do not: one into a full queue waits for
// kernels that may wait for those of another rank, which a thread of this process has yet to
// launch.
void BindCuda(py::module_& module) {
  BindCudaSizes(module);
  BindCudaArgs(module);
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
          [](const CudaWorkspaceHandle& self, const MokCudaLayer& layer, const Routing& routing,
             const Queue& queue) {
            const MokCudaScheduleArgs args = ScheduleArgs(routing, queue);
            CallWithoutGil([&] { return mok_cuda_schedule_build(self.get(), &layer, &args); });
          },
          py::arg("layer"), py::arg("routing"), py::arg("queue"), "Collective.")
      .def(
          "forward",
          [](const CudaWorkspaceHandle& self, const CudaPass& pass,
             const std::array<uintptr_t, 9>& inputs, uintptr_t ring, const Routing& routing,
             uintptr_t out, const Queue& queue) {
            const MokCudaForwardArgs args = pass.ForwardArgs(inputs, ring, routing, out, queue);
            CallWithoutGil([&] { return mok_cuda_forward(self.get(), &pass.layer(), &args); });
          },
          "Collective. Arguments as of CudaPass.forward_args.")
      .def(
          "backward",
          [](const CudaWorkspaceHandle& self, const CudaPass& pass,
             const std::array<uintptr_t, 9>& inputs, uintptr_t ring, const Routing& routing,
             const BackwardOperands& operands, const Queue& queue) {
            const auto args = pass.BackwardArgs(inputs, ring, routing, operands, queue);
            CallWithoutGil([&] { return mok_cuda_backward(self.get(), &pass.layer(), &args); });
          },
          "Collective. Arguments as of CudaPass.backward_args.")
      .def(
          "report_error",
          [](const CudaWorkspaceHandle& self, const MokCudaErrorArgs& args) {
            CallWithoutGil([&] { return mok_cuda_report_error(self.get(), &args); });
          },
          py::arg("args"), "In place of build_schedule, and of forward if args say so.");
  module.def(
      "cuda_matmul",
      [](const MokMatmulArgs& args, int32_t device, uintptr_t stream) {
        CallWithoutGil(
            [&] { return mok_cuda_matmul(&args, device, reinterpret_cast<void*>(stream)); });
      },
      py::arg("args"), py::arg("device"), py::arg("stream"));
}

}  // namespace mok
