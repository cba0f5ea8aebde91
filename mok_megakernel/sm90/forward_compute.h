// The compute roles of the forward: one thread loads tiles, two warpgroups multiply, finish and
// store them.
#pragma once

#include "mok_core/device/device.h"
#include "mok_gemm/sm90/epilogue.h"
#include "mok_gemm/sm90/gemm_worker.h"
#include "mok_megakernel/sm90/forward_work.h"
#include "mok_megakernel/sm90/pass_compute.h"
#include "mok_megakernel/sm90/reduce_epilogue.h"
#include "mok_megakernel/sm90/token_reduce.h"

namespace mok {

MOK_DEVICE TokenReduction ReductionOf(const ForwardParams& p) {
  return {.expert_ids = p.tokens.expert_ids,
          .routes = p.tokens.routes,
          .route_weight = p.tokens.topk_weight,
          .shared = p.shared.y,
          .shared_scale = p.tokens.shared_scale,
          .out = p.tokens.out,
          .hidden = p.shape.hidden,
          .topk = p.shape.topk,
          .id_bytes = p.tokens.id_bytes,
          .is_weighted = true,
          .has_shared = p.shape.shared_intermediate > 0,
          .has_shared_scale = p.tokens.has_shared_scale};
}

// One thread: loads the operands of every tile.
template <class Config>
MOK_DEVICE void ProducerRole(const ForwardParams& p, PassStorage<Config>& s) {
  using Gemm = typename Config::Gemm;
  DeviceWait wait = WaitOf(p, PassRole::kProducer);
  PassQueue<Config> queue(s.queue);
  GemmPipeline<Gemm> pipeline(s.barriers);
  PassTracer tracer(p.trace);
  for (;; queue.Pop()) {
    const ForwardWork& work = queue.Front(wait);
    if (work.kind == ForwardWork::Kind::kEnd) break;
    wait.SetTask(work.task_kind, work.task);
    if (work.kind == ForwardWork::Kind::kReduce) continue;
    const uint64_t begin = tracer.Now();
    // The scheduler has acquired the rows; bulk copies and epilogues of other blocks wrote them.
    if (Config::kBug != PassBug::kNoProxyFence) FenceProxyAsyncGlobal();
    GemmTask tile = work.gemm;
    const bool is_reduced = work.kind == ForwardWork::Kind::kGemmReduce;
    int32_t rest = is_reduced ? work.reduced.columns : Gemm::kTileN;
    for (;;) {
      ProducerLoadTile<Gemm>(tile, s.stages, pipeline, wait);
      rest -= Gemm::kTileN;
      if (rest <= 0) break;
      pass_internal::MoveRight<Gemm>(rest, tile);
    }
    tracer.Record(work.task_kind, TracePhase::kWork, work.task, begin);
  }
}

// Multiplies, finishes and stores a tile.
template <class Config>
MOK_DEVICE void MultiplyTile(const ForwardWork& work, GemmConsumer<typename Config::Gemm>& consumer,
                             const DeviceWait& wait, ConsumerTrace& trace) {
  using Gemm = typename Config::Gemm;
  typename GemmConsumer<Gemm>::Accumulator accumulator;
  const bool has_rows = consumer.MainLoop(work.gemm, wait, accumulator);
  trace.Record(work, TracePhase::kWork);
  if (!has_rows) return;
  if (work.kind == ForwardWork::Kind::kSwiGluGemm) {
    EpilogueSwiGlu<Gemm>(work.gemm, accumulator);
  } else {
    EpilogueStore<Gemm>(work.gemm, accumulator);
  }
}

// The same for the tiles that end a pass with a fused reduction. The accumulators hold zeros
// whenever they are not in use: a multiply names them as inputs, too, and their registers would
// otherwise be kept from one tile to the next, also while the epilogue needs them.
template <class Config>
MOK_DEVICE void MultiplyAndReduce(const TokenReduction& reduction, const ForwardWork& work,
                                  GemmConsumer<typename Config::Gemm>& consumer, LateWait& late,
                                  const DeviceWait& wait, ConsumerTrace& trace) {
  using Gemm = typename Config::Gemm;
  GemmTask tile = work.gemm;
  ReduceTile reduced = work.reduced;
  const TileRoutes routes(reduction, reduced);
  MOK_NO_UNROLL
  for (; reduced.columns > 0; reduced.column += Gemm::kTileN, reduced.columns -= Gemm::kTileN) {
    typename GemmConsumer<Gemm>::Accumulator accumulator = {};
    const bool has_rows = consumer.MainLoop(tile, wait, accumulator);
    trace.Record(work, TracePhase::kWork);
    if (has_rows && late.Await(work.late_counter)) {
      trace.Record(work, TracePhase::kWait);
      EpilogueReduce<Config, Gemm::kOrder>(reduction, reduced, routes, accumulator);
    }
    pass_internal::MoveRight<Gemm>(reduced.columns - Gemm::kTileN, tile);
  }
  trace.Record(work, TracePhase::kStore);
}

// Two warpgroups: first all GEMMs, then all reductions. One loop for both would keep the
// accumulators' registers alive in the reductions, since a tile's first multiply names them as
// inputs, too.
template <class Config>
MOK_DEVICE void ConsumerRole(const ForwardParams& p, PassStorage<Config>& s) {
  using Gemm = typename Config::Gemm;
  using Kind = ForwardWork::Kind;
  DeviceWait wait = WaitOf(p, PassRole::kConsumer);
  PassQueue<Config> queue(s.queue);
  GemmConsumer<Gemm> consumer(s.stages, s.barriers);
  ConsumerTrace trace(p.trace);
  for (;;) {
    const ForwardWork& work = queue.Front(wait);
    if (work.kind != Kind::kGemm && work.kind != Kind::kSwiGluGemm) break;
    wait.SetTask(work.task_kind, work.task);
    trace.Record(work, TracePhase::kWait);
    if (Config::kBug == PassBug::kTaskReleasedBeforeRead) queue.Pop();
    MultiplyTile<Config>(work, consumer, wait, trace);
    trace.Record(work, TracePhase::kStore);
    if (Config::kBug != PassBug::kTaskReleasedBeforeRead) queue.Pop();
  }
  const TokenReduction reduction = ReductionOf(p);
  LateWait late(wait);
  for (;; queue.Pop()) {
    const ForwardWork& work = queue.Front(wait);
    if (work.kind != Kind::kGemmReduce) break;
    wait.SetTask(work.task_kind, work.task);
    trace.Record(work, TracePhase::kWait);
    MultiplyAndReduce<Config>(reduction, work, consumer, late, wait, trace);
  }
  for (;;) {
    const ForwardWork& work = queue.Front(wait);
    if (work.kind == Kind::kEnd) break;
    wait.SetTask(work.task_kind, work.task);
    trace.Record(work, TracePhase::kWait);
    if (Config::kBug == PassBug::kTaskReleasedBeforeRead) queue.Pop();
    ReduceTokens(reduction, work.tokens, static_cast<int>(ThreadIndex().x), Gemm::kConsumerThreads);
    trace.Record(work, TracePhase::kStore);
    if (Config::kBug != PassBug::kTaskReleasedBeforeRead) queue.Pop();
  }
}

}  // namespace mok
