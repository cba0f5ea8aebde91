// Schedules: who computes which row.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "mok_megakernel/mok.h"
#include "mok_torch/csrc/handles.h"

namespace mok {

namespace py = pybind11;

namespace {

ScheduleHandle BuildSchedule(const WorkspaceHandle& workspace, const MokEngineConfig& config,
                             uintptr_t topk_idx, int64_t num_tokens, int32_t num_local_experts,
                             int32_t num_experts) {
  MokScheduleArgs args{};
  args.struct_size = sizeof(args);
  args.topk_idx = reinterpret_cast<const int64_t*>(topk_idx);
  args.num_tokens = num_tokens;
  args.num_local_experts = num_local_experts;
  args.num_experts = num_experts;
  MokSchedule* schedule = nullptr;
  CallWithoutGil([&] { return mok_schedule_build(workspace.get(), &config, &args, &schedule); });
  return ScheduleHandle(schedule);
}

ScheduleHandle LoadSchedule(uintptr_t words, int64_t num_words) {
  MokSchedule* schedule = nullptr;
  CallWithoutGil([&] {
    return mok_schedule_load(reinterpret_cast<const int32_t*>(words), num_words, &schedule);
  });
  return ScheduleHandle(schedule);
}

MokScheduleInfo ScheduleInfo(const ScheduleHandle& schedule) {
  MokScheduleInfo info{};
  info.struct_size = sizeof(info);
  RaiseIfError(mok_schedule_info(schedule.get(), &info));
  return info;
}

std::vector<int64_t> TokensPerExpert(const ScheduleHandle& schedule) {
  std::vector<int64_t> counts(static_cast<size_t>(ScheduleInfo(schedule).num_local_experts));
  RaiseIfError(mok_schedule_tokens_per_expert(schedule.get(), counts.data()));
  return counts;
}

}  // namespace

void BindSchedule(py::module_& module) {
  py::class_<MokScheduleInfo>(module, "ScheduleInfo")
      .def_readonly("num_tokens", &MokScheduleInfo::num_tokens)
      .def_readonly("num_tokens_total", &MokScheduleInfo::num_tokens_total)
      .def_readonly("num_experts", &MokScheduleInfo::num_experts)
      .def_readonly("num_local_experts", &MokScheduleInfo::num_local_experts)
      .def_readonly("first_expert", &MokScheduleInfo::first_expert)
      .def_readonly("num_macrobatches", &MokScheduleInfo::num_macrobatches)
      .def_readonly("num_rows", &MokScheduleInfo::num_rows)
      .def_readonly("num_row_blocks", &MokScheduleInfo::num_row_blocks)
      .def_readonly("minibatch_rows", &MokScheduleInfo::minibatch_rows)
      .def_readonly("ring_rows", &MokScheduleInfo::ring_rows);

  py::class_<ScheduleHandle>(module, "Schedule")
      .def_static("build", &BuildSchedule, py::arg("workspace"), py::arg("config"),
                  py::arg("topk_idx"), py::arg("num_tokens"), py::arg("num_local_experts"),
                  py::arg("num_experts"), "Collective. num_experts: 0 if it is not known.")
      .def("info", &ScheduleInfo)
      .def("tokens_per_expert", &TokensPerExpert)
      .def(
          "save",
          [](const ScheduleHandle& self, uintptr_t words, int64_t num_words) {
            CallWithoutGil([&] {
              return mok_schedule_save(self.get(), reinterpret_cast<int32_t*>(words), num_words);
            });
          },
          py::arg("words"), py::arg("num_words"))
      .def_static("load", &LoadSchedule, py::arg("words"), py::arg("num_words"));
  module.attr("SCHEDULE_HEADER_WORDS") = MOK_SCHEDULE_HEADER_WORDS;
  module.def("capacity_rows", &mok_schedule_capacity_rows, py::arg("num_tokens_total"),
             py::arg("topk"), py::arg("num_local_experts"));
}

}  // namespace mok
