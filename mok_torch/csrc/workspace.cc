// Workspaces, in-process groups, traces and the engine configuration.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "mok_megakernel/mok.h"
#include "mok_torch/csrc/handles.h"

namespace mok {

namespace py = pybind11;

void BindConfig(py::module_& module) {
  py::class_<TraceHandle>(module, "Trace")
      .def(py::init([](int32_t num_workers, int64_t events_per_worker) {
             MokTrace* trace = nullptr;
             RaiseIfError(mok_trace_create(num_workers, events_per_worker, &trace));
             return TraceHandle(trace);
           }),
           py::arg("num_workers"), py::arg("events_per_worker"))
      .def("write", [](const TraceHandle& self, const std::string& path) {
        CallWithoutGil([&] { return mok_trace_write(self.get(), path.c_str()); });
      });

  py::class_<MokEngineConfig>(module, "EngineConfig")
      .def(py::init([] {
        MokEngineConfig config{};
        config.struct_size = sizeof(config);
        config.isa = -1;
        return config;
      }))
      .def_readwrite("num_threads", &MokEngineConfig::num_threads)
      .def_readwrite("num_comm_threads", &MokEngineConfig::num_comm_threads)
      .def_readwrite("minibatch_rows", &MokEngineConfig::minibatch_rows)
      .def_readwrite("macrobatch_rows", &MokEngineConfig::macrobatch_rows)
      .def_readwrite("isa", &MokEngineConfig::isa)
      .def(
          "set_trace",
          [](MokEngineConfig& self, const TraceHandle* trace) {
            self.trace = trace == nullptr ? nullptr : trace->get();
          },
          py::keep_alive<1, 2>(), py::arg("trace"));
}

namespace {

struct WorkspaceShape {
  int64_t max_tokens;
  int32_t hidden;
  int32_t topk;
  int32_t dtype;
};

WorkspaceHandle CreateWorkspace(MokWorkspaceOptions options, const WorkspaceShape& shape,
                                double timeout_seconds) {
  options.struct_size = sizeof(options);
  options.max_tokens = shape.max_tokens;
  options.hidden = shape.hidden;
  options.topk = shape.topk;
  options.dtype = shape.dtype;
  options.timeout_seconds = timeout_seconds;
  MokWorkspace* workspace = nullptr;
  CallWithoutGil([&] { return mok_workspace_create(&options, &workspace); });
  return WorkspaceHandle(workspace);
}

py::dict WorkspaceInfo(const WorkspaceHandle& workspace) {
  MokWorkspaceInfo info{};
  info.struct_size = sizeof(info);
  CallWithoutGil([&] { return mok_workspace_info(workspace.get(), &info); });
  py::dict result;
  result["heap_bytes"] = info.heap_bytes;
  result["scratch_bytes"] = info.scratch_bytes;
  result["num_threads"] = info.num_threads;
  return result;
}

}  // namespace

void BindWorkspace(py::module_& module) {
  py::class_<InProcessGroupHandle>(module, "InProcessGroup")
      .def(py::init([](int32_t size) {
             MokInProcessGroup* group = nullptr;
             RaiseIfError(mok_in_process_group_create(size, &group));
             return InProcessGroupHandle(group);
           }),
           py::arg("size"));

  py::class_<WorkspaceShape>(module, "WorkspaceShape")
      .def(py::init([](int64_t max_tokens, int32_t hidden, int32_t topk, int32_t dtype) {
             return WorkspaceShape{max_tokens, hidden, topk, dtype};
           }),
           py::arg("max_tokens"), py::arg("hidden"), py::arg("topk"), py::arg("dtype"));

  py::class_<WorkspaceHandle>(module, "Workspace")
      .def_static(
          "single",
          [](const WorkspaceShape& shape, double timeout_seconds) {
            MokWorkspaceOptions options{};
            options.ep_size = 1;
            return CreateWorkspace(options, shape, timeout_seconds);
          },
          py::arg("shape"), py::arg("timeout_seconds"), "A workspace of one rank.")
      .def_static(
          "shared_memory",
          [](int32_t rank, int32_t ep_size, const std::string& heap_name,
             const WorkspaceShape& shape, double timeout_seconds) {
            MokWorkspaceOptions options{};
            options.rank = rank;
            options.ep_size = ep_size;
            options.heap_name = heap_name.c_str();
            return CreateWorkspace(options, shape, timeout_seconds);
          },
          py::arg("rank"), py::arg("ep_size"), py::arg("heap_name"), py::arg("shape"),
          py::arg("timeout_seconds"), "Collective over processes of one machine.")
      .def_static(
          "in_process",
          [](int32_t rank, int32_t ep_size, const InProcessGroupHandle& group,
             const WorkspaceShape& shape, double timeout_seconds) {
            MokWorkspaceOptions options{};
            options.rank = rank;
            options.ep_size = ep_size;
            options.group = group.get();
            return CreateWorkspace(options, shape, timeout_seconds);
          },
          py::arg("rank"), py::arg("ep_size"), py::arg("group"), py::arg("shape"),
          py::arg("timeout_seconds"), "Ranks that are threads of this process.")
      .def("check",
           [](const WorkspaceHandle& self) {
             CallWithoutGil([&] { return mok_workspace_check(self.get()); });
           })
      .def("info", &WorkspaceInfo)
      .def("poison",
           [](const WorkspaceHandle& self) {
             CallWithoutGil([&] { return mok_workspace_poison(self.get()); });
           })
      .def(
          "report_error",
          [](const WorkspaceHandle& self, int32_t operation, int32_t code,
             const std::string& message) {
            CallWithoutGil([&] {
              const int32_t result =
                  mok_workspace_report_error(self.get(), operation, code, message.c_str());
              // The caller raises its own error; only another one, a timeout, is news.
              return result == code ? static_cast<int32_t>(MOK_OK) : result;
            });
          },
          py::arg("operation"), py::arg("code"), py::arg("message"));
}

}  // namespace mok
