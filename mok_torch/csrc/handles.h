// Owners of the C API's objects.
#ifndef MOK_TORCH_CSRC_HANDLES_H_
#define MOK_TORCH_CSRC_HANDLES_H_

#include <pybind11/pybind11.h>

#include <memory>

#include "mok_megakernel/mok.h"
#include "mok_torch/csrc/bindings.h"

namespace mok {

// Destroys without the GIL: a workspace joins its worker threads. Python drops its objects with
// the GIL held, but C++ may drop one without it.
template <class Object, void (*Destroy)(Object*)>
struct HandleDeleter {
  void operator()(Object* object) const {
    if (PyGILState_Check() != 0) {
      pybind11::gil_scoped_release release;
      Destroy(object);
    } else {
      Destroy(object);
    }
  }
};

template <class Object, void (*Destroy)(Object*)>
class Handle : public std::unique_ptr<Object, HandleDeleter<Object, Destroy>> {
 public:
  using std::unique_ptr<Object, HandleDeleter<Object, Destroy>>::unique_ptr;
};

using TraceHandle = Handle<MokTrace, mok_trace_destroy>;
using InProcessGroupHandle = Handle<MokInProcessGroup, mok_in_process_group_destroy>;
using WorkspaceHandle = Handle<MokWorkspace, mok_workspace_destroy>;
using ScheduleHandle = Handle<MokSchedule, mok_schedule_destroy>;

}  // namespace mok

#endif  // MOK_TORCH_CSRC_HANDLES_H_
