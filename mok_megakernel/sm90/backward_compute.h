// The compute roles of the backward: one thread loads tiles, two warpgroups multiply, finish and
// store them.
#pragma once

#include "mok_core/device/device.h"
#include "mok_gemm/sm90/backward_worker.h"
#include "mok_gemm/sm90/epilogue.h"
#include "mok_gemm/sm90/gemm_worker.h"
#include "mok_megakernel/sm90/backward_work.h"
#include "mok_megakernel/sm90/pass_compute.h"
#include "mok_megakernel/sm90/pass_reduce.h"

namespace mok {

// No factors: the rows carry the router weight, and the shared scale, since DownGrad.
MOK_DEVICE TokenReduction ReductionOf(const BackwardParams& p) {
  return {.expert_ids = p.tokens.expert_ids,
          .routes = p.tokens.routes,
          .route_weight = nullptr,
          .shared = p.tokens.shared_d_x,
          .shared_scale = nullptr,
          .out = p.tokens.d_x,
          .hidden = p.shape.hidden,
          .topk = p.shape.topk,
          .id_bytes = p.tokens.id_bytes,
          .is_weighted = false,
          .has_shared = p.tokens.has_shared,
          .has_shared_scale = false};
}

// The gradients of the router weights of the tokens' routes, and of the tokens' shared scales: sums
// of tiles, ascending. Routes that do not exist have received nothing: their memory may hold
// anything.
MOK_DEVICE void ReduceScalars(const BackwardParams& p, const TokenReduction& reduction,
                              const TokenRange& tokens, int thread, int num_threads) {
  const int64_t first_route = int64_t{tokens.first} * p.shape.topk;
  for (int32_t i = thread; i < tokens.count * p.shape.topk; i += num_threads) {
    const int64_t route = first_route + i;
    p.tokens.d_topk_weight[route] = reduction.HasRoute(route) ? p.tokens.d_router[route] : 0.0f;
  }
  if (!p.tokens.has_shared_scale) return;
  const int64_t parts = p.tokens.scale_parts;
  for (int32_t i = thread; i < tokens.count; i += num_threads) {
    const int64_t token = tokens.first + i;
    float sum = 0;
    for (int64_t part = 0; part < parts; ++part) {
      sum += p.tokens.d_scale_partial[token * parts + part];
    }
    p.tokens.d_shared_scale[token] = sum;
  }
}

// The tiles of a fused reduction behind its first.
template <class Gemm, class Storage>
MOK_DEVICE void LoadTilesToTheRight(const BackwardWork& work, Storage& s,
                                    GemmPipeline<Gemm>& pipeline, const DeviceWait& wait) {
  ProductTile tile = work.product.product;
  for (int32_t rest = work.reduced.columns - Gemm::kTileN; rest > 0; rest -= Gemm::kTileN) {
    pass_internal::MoveRight<Gemm>(rest, tile);
    gemm_internal::LoadProduct<Gemm, false>(tile, s.stages, pipeline, wait);
  }
}

// One thread: loads the operands of every tile.
template <class Config>
MOK_DEVICE void ProducerRole(const BackwardParams& p, PassStorage<Config>& s) {
  using Gemm = typename Config::Gemm;
  using Kind = BackwardWork::Kind;
  DeviceWait wait = WaitOf(p, PassRole::kProducer);
  PassQueue<Config> queue(s.queue);
  GemmPipeline<Gemm> pipeline(s.barriers);
  PassTracer<Config> tracer(p.trace);
  for (;; queue.Pop()) {
    const BackwardWork& work = queue.Front(wait);
    if (work.kind == Kind::kEnd) break;
    wait.SetTask(work.task_kind, work.task);
    if (work.kind == Kind::kReduce || work.kind == Kind::kNothing) continue;
    const uint64_t begin = tracer.Now();
    // The scheduler has acquired the rows; bulk copies and epilogues of other blocks wrote them.
    if (Config::kBug != PassBug::kNoProxyFence) FenceProxyAsyncGlobal();
    if (work.kind == Kind::kRecompute) {
      ProducerLoadTile<Gemm>(work.recompute, s.stages, pipeline, wait);
    } else {
      ProducerLoadBackwardTile<Gemm>(work.product, s.stages, pipeline, wait);
      if (work.kind == Kind::kFusedReduce) LoadTilesToTheRight<Gemm>(work, s, pipeline, wait);
    }
    tracer.Record(work.task_kind, TracePhase::kWork, work.task, begin);
  }
}

// Two warpgroups: first all GEMMs, then all reductions, so that the accumulators' registers are
// free in these. All tiles use one accumulator: see BackwardConsumer::Run.
template <class Config>
MOK_DEVICE void ConsumerRole(const BackwardParams& p, PassStorage<Config>& s) {
  using Gemm = typename Config::Gemm;
  using Kind = BackwardWork::Kind;
  DeviceWait wait = WaitOf(p, PassRole::kConsumer);
  PassQueue<Config> queue(s.queue);
  BackwardConsumer<Gemm> consumer(s.stages, s.barriers);
  typename BackwardConsumer<Gemm>::Accumulator accumulator;
  ConsumerTrace<Config> trace(p.trace);
  const RowOwners routes = RowOwnersOf(p.exchange.reverse_dispatch);
  for (;;) {
    const BackwardWork& work = queue.Front(wait);
    const Kind kind = Uniform(work.kind);
    if (kind == Kind::kEnd || kind == Kind::kReduce || kind == Kind::kFusedReduce) break;
    wait.SetTask(work.task_kind, work.task);
    trace.Record(work, TracePhase::kWait);
    if (Config::kBug == PassBug::kTaskReleasedBeforeRead) queue.Pop();
    if (kind == Kind::kProduct) {
      consumer.Run(work.product, routes, wait, accumulator);
    } else if (kind == Kind::kRecompute && consumer.MainLoop(work.recompute, wait, accumulator)) {
      EpilogueSwiGlu<Gemm>(work.recompute, accumulator);
    }
    trace.Record(work, TracePhase::kWork);
    if (Config::kBug != PassBug::kTaskReleasedBeforeRead) queue.Pop();
  }
  const TokenReduction reduction = ReductionOf(p);
  const auto scalars = [&](const TokenRange& tokens) {
    ReduceScalars(p, reduction, tokens, static_cast<int>(ThreadIndex().x), Gemm::kConsumerThreads);
  };
  const auto products = [&](const ProductTile& tile, auto& sum) {
    return consumer.Products(tile, wait, sum);
  };
  const auto fused = [&](const BackwardWork& work, LateWait& late) {
    const ReduceTile& reduced = work.reduced;
    MultiplyAndReduce<Config, ColumnOrder::kNatural>(reduction, work, work.product.product, late,
                                                     trace, products);
    if (reduced.column == 0 && late.Await(work.late_counter)) {
      scalars({reduced.token, reduced.rows});
    }
  };
  RunReductions<Config>(reduction, queue, wait, trace, fused, scalars);
}

}  // namespace mok
