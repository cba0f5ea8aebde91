// Bounded waits of device code.
//
// Two kinds of waits, because they fail for different reasons:
//  - A counter in global memory depends on other blocks and other GPUs. If it does not arrive in
//    time (a dead peer), the wait raises the grid's abort flag, writes the DeviceWaitRecord and
//    returns false. Every other counter wait of the grid sees the flag and returns false too. The
//    role that got false takes no further task, sends "end of work" through its pipelines, and so
//    the block drains and the kernel ends normally. Wait for counters before the first load of a
//    task, so that no task is left half issued.
//  - A barrier in shared memory depends on this block (or cluster) only. It is still bounded, but
//    with more patience, since the threads on its other side may be in a counter wait. If it runs
//    out the kernel has a bug, or those threads have made several counter waits in turn, of which
//    each took nearly as long as it may: timeouts are to be longer than a kernel takes that waits
//    for nobody in vain. The wait writes the record and traps.
#pragma once

#include "mok_core/device/device.h"
#include "mok_core/device/wait_record.h"

namespace mok {

// The waits of one role of one thread.
class DeviceWait {
 public:
  MOK_DEVICE DeviceWait(const DeviceWaitParams& params, int32_t role)
      : params_(&params), role_(role) {}

  // What to report from here on: the kind and index of the task that the role works on.
  MOK_DEVICE void SetTask(int32_t kind, int64_t task) {
    task_kind_ = kind;
    task_ = task;
  }

  // Waits until *counter >= target; acquires at gpu (system) scope what its writers released.
  // False: the grid is aborted.
  MOK_DEVICE bool ForCounterGpu(const uint64_t* counter, uint64_t target) const {
    return ForCounterGpu(counter, target, [] {});
  }
  MOK_DEVICE bool ForCounterSys(const uint64_t* counter, uint64_t target) const {
    return ForCounter(counter, target, [](const uint64_t* p) { return LoadAcquireSys(p); }, [] {});
  }
  // meanwhile(): what the thread has to do for others while it waits.
  template <class Meanwhile>
  MOK_DEVICE bool ForCounterGpu(const uint64_t* counter, uint64_t target,
                                Meanwhile meanwhile) const {
    return ForCounter(
        counter, target, [](const uint64_t* p) { return LoadAcquireGpu(p); }, meanwhile);
  }

  // Waits for the phase of that parity of a barrier in this block's shared memory.
  MOK_DEVICE void ForBarrier(uint64_t* barrier, uint32_t parity) const {
    if (MbarrierTryWait(barrier, parity)) return;
    WaitForBarrier(parity, [&] { return MbarrierTryWait(barrier, parity); });
  }

  // As ForBarrier; also acquires what other blocks of the cluster released to the barrier.
  MOK_DEVICE void ForBarrierCluster(uint64_t* barrier, uint32_t parity) const {
    if (MbarrierTryWaitCluster(barrier, parity)) return;
    WaitForBarrier(parity, [&] { return MbarrierTryWaitCluster(barrier, parity); });
  }

  MOK_DEVICE bool aborted() const { return LoadRelaxedGpu(params_->abort_flag) != 0; }

 private:
  static constexpr uint64_t kBarrierPatience = 3;  // in counter timeouts
  static constexpr uint32_t kPauseNs = 64;

  template <class Load, class Meanwhile>
  MOK_DEVICE bool ForCounter(const uint64_t* counter, uint64_t target, Load load,
                             Meanwhile meanwhile) const {
    uint64_t observed = load(counter);
    if (observed >= target) return true;
    const uint64_t start = GlobalTimer();
    for (;;) {
      observed = load(counter);
      if (observed >= target) return true;
      if (aborted()) return false;
      meanwhile();
      const uint64_t waited = GlobalTimer() - start;
      if (waited > params_->timeout_ns) {
        Abort(target, observed, waited);
        return false;
      }
      NanoSleep(kPauseNs);
    }
  }

  template <class TryWait>
  MOK_DEVICE void WaitForBarrier(uint32_t parity, TryWait try_wait) const {
    const uint64_t start = GlobalTimer();
    while (!try_wait()) {
      const uint64_t waited = GlobalTimer() - start;
      if (waited <= kBarrierPatience * params_->timeout_ns) continue;
      Abort(parity, parity ^ 1u, waited);
      Trap();
    }
  }

  // The flag elects who writes the record, which host memory cannot do: there are no atomics on it.
  MOK_DEVICE void Abort(uint64_t expected, uint64_t observed, uint64_t waited) const {
    if (AtomicCompareSwapAcquireReleaseGpu(params_->abort_flag, 0, 1) != 0) return;
    DeviceWaitRecord* record = params_->record;
    StoreRelaxedSys(&record->state, uint32_t{1});
    const Index3 block = BlockIndex(), grid = GridDimensions();
    const Index3 thread = ThreadIndex(), size = BlockDimensions();
    record->rank = params_->rank;
    record->block = static_cast<int32_t>((block.z * grid.y + block.y) * grid.x + block.x);
    record->thread = static_cast<int32_t>((thread.z * size.y + thread.y) * size.x + thread.x);
    record->role = role_;
    record->task_kind = task_kind_;
    record->task = task_;
    record->expected = expected;
    record->observed = observed;
    record->waited_ns = waited;
    StoreReleaseSys(&record->state, uint32_t{2});
  }

  const DeviceWaitParams* params_;
  int32_t role_;
  int32_t task_kind_ = -1;
  int64_t task_ = -1;
};

}  // namespace mok
