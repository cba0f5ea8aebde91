// The body of a pass's kernel, one block per SM: initialise, switch roles, tear down.
//
//   warps 0-7   consumers: wgmma, epilogues, TokenReduce        (forward_compute.h, backward_...)
//   warp  8     producer: tensor loads                          (forward_compute.h, backward_...)
//   warp  9     scheduler: tickets, dependencies                (pass_compute.h)
//   warp  10    pull: entry barrier, rows coming in             (pass_exchange.h)
//   warp  11    push: rows going out, exit barrier              (pass_exchange.h)
//
// With num_comm_sms = n > 0 the first n blocks only exchange, with all their warps, and the others
// have no exchange warps.
#pragma once

#include "mok_core/device/device.h"
#include "mok_megakernel/sm90/pass_compute.h"
#include "mok_megakernel/sm90/pass_exchange.h"
#include "mok_megakernel/sm90/pass_storage.h"
#include "mok_schedule/device/device_schedule.h"

namespace mok {

namespace pass_internal {

template <class Config, class Params>
MOK_DEVICE void Initialize(const Params& p, PassStorage<Config>& s, int warp) {
  const int lane = static_cast<int>(ThreadIndex().x) % 32;
  if (warp == kSchedulerWarp) {
    const bool has_rows = PassTakesPart(p) || Config::kBug == PassBug::kLostHasRows;
    if (lane == 0) PlaceUncountedProgramView(p.shape.program, p.schedule, has_rows, &s.program);
    SyncWarp();
    if (lane < kNumQueues) s.program.CountTasks(static_cast<Queue>(lane));
    return;
  }
  if (warp == kPullWarp) {
    if (BlockIndex().x == 0) TellEntry<Config>(p);
    return;
  }
  if (lane != 0) return;
  if (warp == 0) {
    InitializeGemm<typename Config::Gemm>(s.stages, s.barriers);
    constexpr uint32_t kReaders = Config::Gemm::kConsumerThreads + 1;  // and the producer
    PassQueue<Config>::Initialize(s.queue, kReaders);
    MOK_NO_UNROLL
    for (int i = 0; i < kPassWarps * kStagingChunks; ++i) {
      uint64_t* full = &s.chunk_full[i / kStagingChunks][i % kStagingChunks];
      MbarrierInit(full, 1);
      MOK_NAME(full, "chunk_full", i);
    }
    MbarrierInit(&s.pulling, 1);
    MOK_NAME(&s.pulling, "pulling", -1);
    FenceMbarrierInit();
  } else if (warp == kProducerWarp) {
    PrefetchTensorMaps(p);
  }
}

MOK_DEVICE Direction DirectionOf(int warp) {
  static_assert(kPullWarp % 2 == 0 && kPushWarp % 2 == 1);
  return warp % 2 == 0 ? Direction::kPull : Direction::kPush;
}

// The seat of an exchange warp; false: the warp does not exchange.
template <class Config, class Params>
MOK_DEVICE bool FindSeat(const Params& p, PassStorage<Config>& s, int warp, ExchangeSeat& seat) {
  const auto block = static_cast<int32_t>(BlockIndex().x);
  if (p.shape.num_comm_sms == 0) {
    if (warp != kPullWarp && warp != kPushWarp) return false;
    seat.direction = DirectionOf(warp);
    seat.first = block;
    seat.step = static_cast<int32_t>(GridDimensions().x);
    seat.staging = {s.chunks[warp - kPullWarp][0], s.chunk_full[warp], p.exchange.chunk_bytes,
                    Config::kChunkBytes};
    seat.pulling = &s.pulling;
    seat.shares_pushes = true;
    return true;
  }
  if (block >= p.shape.num_comm_sms) return false;
  constexpr int32_t kSeatsPerBlock = kPassWarps / 2;
  seat.direction = DirectionOf(warp);
  seat.first = block * kSeatsPerBlock + warp / 2;
  seat.step = p.shape.num_comm_sms * kSeatsPerBlock;
  seat.staging = {s.dedicated_chunks[warp][0], s.chunk_full[warp], p.exchange.dedicated_chunk_bytes,
                  PassStorage<Config>::kDedicatedChunkBytes};
  seat.pulling = nullptr;
  seat.shares_pushes = false;
  return true;
}

// By every block as its last step, after all its roles. The block that comes last leaves counters
// and state ready for the next launch.
template <class Config, class Params>
MOK_DEVICE void FinishLaunch(const Params& p, const ProgramView& program) {
  const int lane = static_cast<int>(ThreadIndex().x) % 32;
  PassState* state = p.signals.state;
  uint64_t before = 0;
  if (lane == 0) before = AtomicAddAcquireReleaseGpu(&state->finished_blocks, uint64_t{1});
  if (Shuffle(before, 0) + 1 != GridDimensions().x) return;
  SyncWarp();  // what lane 0 has acquired
  if (Config::kBug != PassBug::kCountersKept) {
    for (int32_t i = lane; i < program.NumCounters(); i += 32) {
      StoreRelaxedGpu(p.signals.counters + i, uint64_t{0});
    }
  }
  if (lane != 0) return;
  StoreRelaxedGpu(&state->finished_blocks, uint64_t{0});
  if (MeetsPeers<Config>(p) && Config::kBug != PassBug::kEpochKept) {
    StoreRelaxedGpu(&state->epoch, LoadRelaxedGpu(&state->epoch) + 1);
  }
  if (IsLate(*p.schedule.result, state->refusals) && Config::kBug != PassBug::kLostNotTold) {
    StoreRelaxedGpu(&state->refusals.late_passes, uint64_t{1});
  }
}

}  // namespace pass_internal

// All threads of all blocks. The pass brings, for its Params: PrefetchTensorMaps, FillWork,
// ProducerRole, ConsumerRole, ExchangeOf and ScalarsOf.
template <class Config, class Params>
MOK_DEVICE void RunPass(const Params& p, PassStorage<Config>& s) {
  using namespace pass_internal;
  static_assert(sizeof(PassStorage<Config>) <= kMaxBlockSharedBytes);
  const int warp = Uniform(static_cast<int>(ThreadIndex().x) / 32);
  // The first task that scheduler and exchange warps record includes the start of the block.
  const uint64_t begin = PassTracer<Config>(p.trace).Now();
  Initialize(p, s, warp);
  SyncWarp();
  SyncBlock();

  const bool only_exchanges = static_cast<int32_t>(BlockIndex().x) < p.shape.num_comm_sms;
  if (!only_exchanges && warp < kProducerWarp) {
    IncreaseRegisters<kSm90ConsumerRegisters>();
    ConsumerRole<Config>(p, s);
  } else {
    DecreaseRegisters<kSm90ProducerRegisters>();
    const bool leader = ThreadIndex().x % 32 == 0;
    ExchangeSeat seat;
    if (FindSeat(p, s, warp, seat)) {
      ExchangeRole<Config>(p, s, seat, begin);
    } else if (warp == kProducerWarp && leader) {
      ProducerRole<Config>(p, s);
    } else if (warp == kSchedulerWarp && leader) {
      SchedulerRole<Config>(p, s, begin);
    }
  }

  SyncWarp();
  SyncBlock();
  if (warp == 0) FinishLaunch<Config>(p, s.program);
}

}  // namespace mok
