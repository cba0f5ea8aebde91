// The compute roles of the forward: one thread loads tiles, two warpgroups multiply, finish and
// store them.
#pragma once

#include "mok_core/device/device.h"
#include "mok_gemm/sm90/epilogue.h"
#include "mok_gemm/sm90/gemm_worker.h"
#include "mok_megakernel/sm90/forward_work.h"
#include "mok_megakernel/sm90/pass_compute.h"
#include "mok_megakernel/sm90/pass_reduce.h"

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
  PassTracer<Config> tracer(p.trace);
  for (;; queue.Pop()) {
    const ForwardWork& work = queue.Front(wait);
    if (work.kind == ForwardWork::Kind::kEnd) break;
    wait.SetTask(work.task_kind, work.task);
    if (work.kind == ForwardWork::Kind::kReduce) continue;
    const uint64_t begin = tracer.Now();
    // The scheduler has acquired the rows; bulk copies and epilogues of other blocks wrote them.
    if (Config::kBug != PassBug::kNoProxyFence) FenceProxyAsyncGlobal();
    GemmTask tile = work.gemm;
    const bool is_reduced = work.kind == ForwardWork::Kind::kFusedReduce;
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
MOK_DEVICE void MultiplyTile(const ForwardParams& p, const ForwardWork& work,
                             GemmConsumer<typename Config::Gemm>& consumer, const DeviceWait& wait,
                             ConsumerTrace<Config>& trace) {
  using Gemm = typename Config::Gemm;
  typename GemmConsumer<Gemm>::Accumulator accumulator;
  const RowOwners routes = RowOwnersOf(p.exchange.combine);
  const OwnersOfRows owners(routes, work.own_rows, StoredRow());
  const bool has_rows = consumer.MainLoop(work.gemm, wait, accumulator);
  trace.Record(work, TracePhase::kWork);
  if (!has_rows) return;
  if (Uniform(work.kind) == ForwardWork::Kind::kSwiGluGemm) {
    EpilogueSwiGlu<Gemm>(work.gemm, accumulator);
  } else {
    const int64_t stride = work.gemm.out_stride;
    const StoredRows rows = RowsOfMatrix(work.gemm.out, stride, StoredRow());
    EpilogueStore<Gemm>(work.gemm, owners.Place(rows, routes, work.own_rows, stride), accumulator);
  }
}

// Two warpgroups: first all GEMMs, then all reductions.
template <class Config>
MOK_DEVICE void ConsumerRole(const ForwardParams& p, PassStorage<Config>& s) {
  using Gemm = typename Config::Gemm;
  using Kind = ForwardWork::Kind;
  DeviceWait wait = WaitOf(p, PassRole::kConsumer);
  PassQueue<Config> queue(s.queue);
  GemmConsumer<Gemm> consumer(s.stages, s.barriers);
  ConsumerTrace<Config> trace(p.trace);
  for (;;) {
    const ForwardWork& work = queue.Front(wait);
    const Kind kind = Uniform(work.kind);
    if (kind != Kind::kGemm && kind != Kind::kSwiGluGemm) break;
    wait.SetTask(work.task_kind, work.task);
    trace.Record(work, TracePhase::kWait);
    if (Config::kBug == PassBug::kTaskReleasedBeforeRead) queue.Pop();
    MultiplyTile<Config>(p, work, consumer, wait, trace);
    trace.Record(work, TracePhase::kStore);
    if (Config::kBug != PassBug::kTaskReleasedBeforeRead) queue.Pop();
  }
  const TokenReduction reduction = ReductionOf(p);
  const auto products = [&](const GemmTask& tile, auto& accumulator) {
    return consumer.MainLoop(tile, wait, accumulator);
  };
  const auto fused = [&](const ForwardWork& work, LateWait& late) {
    MultiplyAndReduce<Config, Gemm::kOrder>(reduction, work, work.gemm, late, trace, products);
  };
  RunReductions<Config>(reduction, queue, wait, trace, fused, [](const TokenRange&) {});
}

}  // namespace mok
