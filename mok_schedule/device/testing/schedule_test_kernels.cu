#include "mok_schedule/device/testing/schedule_test_kernels.h"

#include "mok_core/device/device.h"
#include "mok_schedule/device/schedule_kernel.h"
#include "mok_schedule/program_dependencies.h"

namespace mok::testing {
namespace {

constexpr int kSmallThreads = 64;

MOK_KERNEL(kDecodeThreads, 1)
DecodeKernel(MOK_GRID_CONSTANT(DecodeParams) p) {
  // As a pass makes it, but every thread for itself.
  alignas(ProgramView) unsigned char storage[sizeof(ProgramView)];
  auto* const view = reinterpret_cast<ProgramView*>(storage);
  PlaceUncountedProgramView(p.shape, p.schedule, true, view);
  for (int queue = 0; queue < kNumQueues; ++queue) view->CountTasks(static_cast<Queue>(queue));
  const ProgramView& program = *view;
  const int64_t num_tasks = program.NumTasks(p.queue);
  const int64_t stride = int64_t{GridDimensions().x} * kDecodeThreads;
  const int64_t begin = int64_t{BlockIndex().x} * kDecodeThreads + Thread();
  if (begin == 0) *p.num_tasks = num_tasks;
  for (int64_t i = begin; i < num_tasks && i < p.capacity; i += stride) {
    p.tasks[i] = program.Decode(p.queue, i);
    p.dependencies[i] = DependenciesOf(program, p.tasks[i]);
  }
}

template <int kBug>
const void* Address(int bug) {
#if defined(MOK_EMULATOR)
  if constexpr (kBug < kScheduleBugCount) {
    if (bug == kBug) {
      return reinterpret_cast<const void*>(&ScheduleKernel<kSmallThreads, kBug>);
    }
    return Address<kBug + 1>(bug);
  }
  return nullptr;
#else
  return bug == kScheduleCorrect
             ? reinterpret_cast<const void*>(&ScheduleKernel<kSmallThreads, kScheduleCorrect>)
             : nullptr;
#endif
}

}  // namespace

ScheduleKernelInfo GetSmallScheduleKernel(int bug) {
  return {Address<kScheduleCorrect>(bug), kSmallThreads, sizeof(ScheduleStorage<kSmallThreads>)};
}

const void* DecodeKernelAddress() { return reinterpret_cast<const void*>(&DecodeKernel); }

}  // namespace mok::testing
