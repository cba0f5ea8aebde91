// A ring of stages in shared memory between producers and consumers, with one pair of barriers per
// stage.
//
//   producer: Acquire -> fill the stage -> ExpectBytes + transfers, or Commit -> Advance
//   consumer: Wait -> use the stage -> Release -> Advance
//
// `full` completes when the producers have arrived and all announced bytes have landed; `empty`
// when all consumers have released. Phase convention: every thread counts its passes over the ring
// in one bit that starts at 0; the consumer of pass p waits for the phase of parity p of `full`,
// the producer of pass p for parity p ^ 1 of `empty`. A fresh barrier counts as having completed a
// phase of parity 1, so the first pass of the producer does not wait.
#pragma once

#include "mok_core/device/device.h"

namespace mok {

// Member of the kernel's shared storage.
template <int kStages>
struct PipelineBarriers {
  uint64_t full[kStages];   // producers -> consumers
  uint64_t empty[kStages];  // consumers -> producers
};

// One thread's position in the ring. Waits go through a Waiter with ForBarrier,
// such as DeviceWait.
template <int kStages>
class Pipeline {
 public:
  // By one thread; FenceMbarrierInit and a block or cluster barrier have to follow. full_arrivals:
  // producer arrivals per stage (1 for an elected thread with ExpectBytes); empty_arrivals: how
  // many threads call Release per stage.
  static MOK_DEVICE void Initialize(PipelineBarriers<kStages>& barriers, uint32_t full_arrivals,
                                    uint32_t empty_arrivals) {
    for (int i = 0; i < kStages; ++i) {
      MbarrierInit(&barriers.full[i], full_arrivals);
      MbarrierInit(&barriers.empty[i], empty_arrivals);
      MOK_NAME(&barriers.full[i], "full", i);
      MOK_NAME(&barriers.empty[i], "empty", i);
    }
  }

  explicit MOK_DEVICE Pipeline(PipelineBarriers<kStages>& barriers) : barriers_(&barriers) {}

  MOK_DEVICE int stage() const { return stage_; }

  MOK_DEVICE void Advance() {
    if (++stage_ == kStages) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

  // Back to the stage before.
  MOK_DEVICE void Retreat() {
    if (--stage_ < 0) {
      stage_ = kStages - 1;
      phase_ ^= 1;
    }
  }

  // Producer: the stage is free.
  template <class Waiter>
  MOK_DEVICE void Acquire(const Waiter& wait) {
    wait.ForBarrier(&barriers_->empty[stage_], phase_ ^ 1);
  }

  // Producer: arrives, and announces `bytes` of transfers, which complete on the returned barrier.
  MOK_DEVICE uint64_t* ExpectBytes(uint32_t bytes) {
    uint64_t* barrier = &barriers_->full[stage_];
    MbarrierArriveExpectTransaction(barrier, bytes);
    return barrier;
  }

  // Producer: arrives after filling the stage with plain stores.
  MOK_DEVICE void Commit() { MbarrierArrive(&barriers_->full[stage_]); }

  // Producer, through an object of its own that follows the one it fills stages with: the consumers
  // have released the stage that was filled.
  MOK_DEVICE bool IsReleased() const { return MbarrierTestWait(&barriers_->empty[stage_], phase_); }
  template <class Waiter>
  MOK_DEVICE void AwaitRelease(const Waiter& wait) {
    wait.ForBarrier(&barriers_->empty[stage_], phase_);
  }

  // Consumer: the stage is full.
  template <class Waiter>
  MOK_DEVICE void Wait(const Waiter& wait) {
    wait.ForBarrier(&barriers_->full[stage_], phase_);
  }

  MOK_DEVICE bool IsFull() const { return MbarrierTestWait(&barriers_->full[stage_], phase_); }

  // Consumer: this thread (and those it has synchronised with) has finished with the stage.
  MOK_DEVICE void Release() { ReleaseStage(stage_); }
  MOK_DEVICE void ReleaseStage(int stage) { MbarrierArrive(&barriers_->empty[stage]); }

 private:
  PipelineBarriers<kStages>* barriers_;
  int stage_ = 0;
  uint32_t phase_ = 0;
};

// The unbounded Waiter, for kernels without a wait record.
struct SpinWait {
  MOK_DEVICE void ForBarrier(uint64_t* barrier, uint32_t parity) const {
    while (!MbarrierTryWait(barrier, parity)) {
    }
  }
  MOK_DEVICE void ForBarrierCluster(uint64_t* barrier, uint32_t parity) const {
    while (!MbarrierTryWaitCluster(barrier, parity)) {
    }
  }
};

}  // namespace mok
