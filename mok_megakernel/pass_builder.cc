#include "mok_megakernel/pass_builder.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "mok_core/bits.h"
#include "mok_megakernel/task_roles.h"

namespace mok {
namespace {

// What both passes have in common.
struct PassInputs {
  Pass pass;
  const Schedule& schedule;
  const MokLayer& layer;
  const MokContext& context;
  const void* d_out;      // backward
  int kept_macrobatches;  // backward
};

template <class Void>
BasicUntypedMatrix<Void> Rows(Void* data, int64_t rows, int64_t columns, DType dtype) {
  return {data, rows, columns, columns, dtype};
}

LayerShape ShapeOf(const Workspace& workspace, const EngineConfig& config,
                   const PassInputs& inputs) {
  LayerShape shape;
  shape.num_tokens = inputs.schedule.num_tokens;
  shape.hidden = workspace.shape().hidden;
  shape.intermediate = inputs.layer.routed.intermediate;
  shape.shared_intermediate = inputs.layer.shared.intermediate;
  shape.topk = workspace.shape().topk;
  shape.dtype = workspace.shape().dtype;
  shape.swiglu_limit = inputs.layer.swiglu_limit > 0 ? inputs.layer.swiglu_limit
                                                     : std::numeric_limits<float>::infinity();
  shape.isa = config.isa;
  return shape;
}

RingPlan PlanRing(const LayerShape& shape, const EngineConfig& config, const Schedule& schedule) {
  if (schedule.minibatch_rows > 0) return schedule.Ring(schedule.minibatch_rows);
  MinibatchModel model;
  model.intermediate = shape.intermediate;
  model.tile_rows = kHostTileRows;
  model.tile_columns = 2 * kHostTileI;
  model.workers_per_tile = 1;
  model.num_workers = config.crew.compute;
  // Threads come to the end of a wave at different times: enough independent tiles lie between a
  // tile and those that need it for a worker hardly ever to wait.
  model.waves = 8;
  return schedule.Ring(DefaultMinibatchRows(model));
}

ProgramShape ProgramShapeOf(const PassInputs& inputs, const LayerShape& shape,
                            const RingPlan& ring) {
  const TileCounts tiles = CountTiles(shape);
  ProgramShape program;
  program.pass = inputs.pass;
  program.ring = ring;
  program.intermediate_tiles = tiles.intermediate;
  program.down_grad_tiles = tiles.intermediate;
  program.hidden_tiles = tiles.hidden;
  program.weight_grad_down_tiles = tiles.weight_grad_down;
  program.weight_grad_gate_up_tiles = tiles.weight_grad_gate_up;
  program.token_reduce_tiles = tiles.token_reduce;
  program.token_blocks = CeilDiv<int64_t>(shape.num_tokens, kRowBlock);
  program.shared_intermediate_tiles = tiles.shared_intermediate;
  program.shared_down_grad_tiles = tiles.shared_intermediate;
  program.shared_weight_grad_down_tiles = tiles.shared_weight_grad_down;
  program.shared_weight_grad_gate_up_tiles = tiles.shared_weight_grad_gate_up;
  program.kept_macrobatches = inputs.kept_macrobatches;
  return program;
}

ExpertParams ExpertsOf(const MokWeights& weights, int64_t num_experts, const LayerShape& shape) {
  const int64_t intermediate = weights.intermediate;
  return {Rows(weights.gate, num_experts * intermediate, shape.hidden, shape.dtype),
          Rows(weights.up, num_experts * intermediate, shape.hidden, shape.dtype),
          Rows(weights.down, num_experts * shape.hidden, intermediate, shape.dtype)};
}

ExpertGradParams GradsOf(const MokWeightGrads& grads, int64_t num_experts, int64_t intermediate,
                         int64_t hidden) {
  const DType dtype = static_cast<DType>(grads.dtype);
  return {Rows(grads.gate, num_experts * intermediate, hidden, dtype),
          Rows(grads.up, num_experts * intermediate, hidden, dtype),
          Rows(grads.down, num_experts * hidden, intermediate, dtype), grads.accumulate != 0};
}

// A tensor of this rank that peers read: copied to its place in the heap before the entry barrier,
// or, by a single rank, read where it lies.
PeerBuffers Share(const Workspace& workspace, const void* tensor, size_t offset, int64_t row_bytes,
                  PassParams* params) {
  const int index = params->num_staged++;
  const auto* source = static_cast<const std::byte*>(tensor);
  if (workspace.shape().ep_size == 1) {
    params->in_place[index] = const_cast<std::byte*>(source);  // only ever pulled from
    return {&params->in_place[index], 0, row_bytes};
  }
  params->staged[index] = {workspace.heap().local() + offset, source, 0};
  return {workspace.heap().bases(), offset, row_bytes};
}

void FillExchange(const Workspace& workspace, const PassInputs& inputs, PassParams* params) {
  const LayerShape& shape = params->shape;
  const HeapRegions& regions = workspace.regions();
  ExchangeParams& exchange = params->exchange;
  const RoutingTable& table = inputs.schedule.table;
  exchange.table = {table.source_rank.data(), table.source_route.data(), table.num_rows()};
  const int64_t row_bytes = shape.hidden * ElementBytes(shape.dtype);
  const int64_t weight_bytes = sizeof(float);
  const auto share = [&](const void* tensor, size_t offset, int64_t bytes_per_row, int64_t rows) {
    const PeerBuffers buffers = Share(workspace, tensor, offset, bytes_per_row, params);
    params->staged[params->num_staged - 1].bytes = static_cast<size_t>(rows * bytes_per_row);
    return buffers;
  };
  exchange.x = share(inputs.layer.x, regions.x, row_bytes, shape.num_tokens);
  if (inputs.pass == Pass::kBackward) {
    exchange.d_out = share(inputs.d_out, regions.d_out, row_bytes, shape.num_tokens);
    exchange.topk_weight = share(inputs.layer.topk_weight, regions.topk_weight, weight_bytes,
                                 shape.num_tokens * shape.topk);
  }
  if (workspace.shape().ep_size == 1) params->num_staged = 0;
  exchange.rows = {workspace.heap().bases(), regions.rows, row_bytes};
  exchange.d_topk_weight = {workspace.heap().bases(), regions.d_topk_weight, weight_bytes};
  params->reduce_rows = {workspace.heap().local() + regions.rows, nullptr};
  params->local_d_topk_weight =
      reinterpret_cast<const float*>(workspace.heap().local() + regions.d_topk_weight);
}

void FillInputs(const PassInputs& inputs, PassParams* params) {
  const LayerShape& shape = params->shape;
  const MokLayer& layer = inputs.layer;
  const MokContext& context = inputs.context;
  const DType dtype = shape.dtype;
  params->table = inputs.schedule.table.view();
  params->tokens.x = Rows(layer.x, shape.num_tokens, shape.hidden, dtype);
  params->tokens.d_out = Rows(inputs.d_out, shape.num_tokens, shape.hidden, dtype);
  params->tokens.topk_weight = layer.topk_weight;
  params->tokens.shared_scale = layer.shared_scale;
  params->tokens.expert_ids = inputs.schedule.expert_ids.data();
  params->routed = ExpertsOf(layer.routed, inputs.schedule.table.num_local_experts, shape);
  params->shared = ExpertsOf(layer.shared, 1, shape);
  params->ring.x = Rows(context.ring_x, context.ring_rows, shape.hidden, dtype);
  params->ring.gate = Rows(context.ring_gate, context.ring_rows, shape.intermediate, dtype);
  params->ring.up = Rows(context.ring_up, context.ring_rows, shape.intermediate, dtype);
  params->ring.shared_gate =
      Rows(context.shared_gate, shape.num_tokens, shape.shared_intermediate, dtype);
  params->ring.shared_up =
      Rows(context.shared_up, shape.num_tokens, shape.shared_intermediate, dtype);
}

// Zeros to the rows of the ring behind those of the last row block.
void StageSpareBlocks(PassParams* params) {
  const RingPlan& plan = params->ring_plan;
  const int64_t used = std::min(plan.num_row_blocks, plan.macrobatch_blocks) * kRowBlock;
  for (const UntypedMatrix* matrix : {&params->ring.x, &params->ring.gate, &params->ring.up}) {
    if (matrix->rows <= used || matrix->columns == 0) continue;
    params->staged[params->num_staged++] = {
        matrix->At(used, 0), nullptr,
        static_cast<size_t>((matrix->rows - used) * matrix->row_bytes())};
  }
}

// Hands out the regions of the scratch memory as matrices.
class ScratchMatrices {
 public:
  ScratchMatrices(std::byte* base, const ScratchShape& shape) : base_(base), shape_(shape) {}

  UntypedMatrix Ring(size_t offset, int64_t columns) const {
    return Rows<void>(base_ + offset, shape_.ring_rows, columns, shape_.dtype);
  }
  UntypedMatrix Tokens(size_t offset, int64_t columns) const {
    return Rows<void>(base_ + offset, shape_.num_tokens, columns, shape_.dtype);
  }
  float* Floats(size_t offset) const { return reinterpret_cast<float*>(base_ + offset); }
  MatrixView<float> FloatMatrix(size_t offset, int64_t rows, int64_t columns) const {
    return ContiguousMatrix(Floats(offset), rows, columns);
  }

 private:
  std::byte* const base_;
  const ScratchShape& shape_;
};

ForwardScratch ForwardScratchOf(const ScratchMatrices& scratch, const ScratchRegions& regions,
                                const LayerShape& shape) {
  return {scratch.Ring(regions.activation, shape.intermediate),
          scratch.Ring(regions.y, shape.hidden),
          scratch.Tokens(regions.shared_activation, shape.shared_intermediate),
          scratch.Tokens(regions.shared_y, shape.hidden)};
}

BackwardScratch BackwardScratchOf(const ScratchMatrices& scratch, const ScratchRegions& regions,
                                  const ScratchShape& shape) {
  const int64_t hidden = shape.hidden;
  const int64_t intermediate = shape.intermediate;
  const int64_t shared_intermediate = shape.shared_intermediate;
  BackwardScratch result;
  result.d_out = scratch.Ring(regions.d_out, hidden);
  result.d_gate = scratch.Ring(regions.d_gate, intermediate);
  result.d_up = scratch.Ring(regions.d_up, intermediate);
  result.weighted_h = scratch.Ring(regions.weighted_h, intermediate);
  result.d_x = scratch.Ring(regions.d_x, hidden);
  result.d_router_partial =
      scratch.FloatMatrix(regions.d_router_partial, shape.ring_rows, shape.intermediate_tiles);
  result.router_weight = scratch.Floats(regions.router_weight);
  result.d_router = scratch.Floats(regions.d_router);
  result.shared_d_gate = scratch.Tokens(regions.shared_d_gate, shared_intermediate);
  result.shared_d_up = scratch.Tokens(regions.shared_d_up, shared_intermediate);
  result.shared_weighted_h = scratch.Tokens(regions.shared_weighted_h, shared_intermediate);
  result.shared_d_x = scratch.Tokens(regions.shared_d_x, hidden);
  result.d_scale_partial = scratch.FloatMatrix(regions.d_scale_partial, shape.num_tokens,
                                               shape.shared_intermediate_tiles);
  result.carry_gate = scratch.FloatMatrix(regions.carry_gate, intermediate, hidden);
  result.carry_up = scratch.FloatMatrix(regions.carry_up, intermediate, hidden);
  result.carry_down = scratch.FloatMatrix(regions.carry_down, hidden, intermediate);
  return result;
}

Status FillScratch(Workspace& workspace, Pass pass, const Schedule& schedule,
                   PreparedPass* prepared) {
  PassParams& params = prepared->params;
  const LayerShape& shape = params.shape;
  const TileCounts tiles = CountTiles(shape);
  ScratchShape scratch_shape;
  scratch_shape.pass = pass;
  scratch_shape.dtype = shape.dtype;
  scratch_shape.ring_rows = params.ring_plan.macrobatch_blocks * kRowBlock;
  scratch_shape.num_tokens = workspace.shape().max_tokens;
  scratch_shape.hidden = shape.hidden;
  scratch_shape.intermediate = shape.intermediate;
  scratch_shape.shared_intermediate = shape.shared_intermediate;
  scratch_shape.intermediate_tiles = tiles.intermediate;
  scratch_shape.shared_intermediate_tiles = tiles.shared_intermediate;
  scratch_shape.num_counters = prepared->program->NumCounters();
  scratch_shape.carries = params.ring_plan.num_macrobatches() > 1;
  const ScratchRegions regions = LayOutScratch(scratch_shape);
  MOK_RETURN_IF_ERROR(workspace.scratch().Reserve(regions.bytes));
  std::byte* base = workspace.scratch().data();
  prepared->counters = reinterpret_cast<Counter*>(base + regions.counters);
  std::fill_n(prepared->counters, scratch_shape.num_counters, Counter{});
  const ScratchMatrices scratch(base, scratch_shape);
  if (pass == Pass::kForward) {
    params.forward = ForwardScratchOf(scratch, regions, shape);
  } else {
    params.backward = BackwardScratchOf(scratch, regions, scratch_shape);
  }
  if (workspace.shape().ep_size == 1 && params.ring_plan.num_macrobatches() <= 1) {
    const bool forward = pass == Pass::kForward;
    params.reduce_rows = {(forward ? params.forward.y : params.backward.d_x).At(0, 0),
                          schedule.row_of_route.data()};
  }
  return OkStatus();
}

Status Prepare(Workspace& workspace, const EngineConfig& config, const PassInputs& inputs,
               PreparedPass* pass) {
  PassParams& params = pass->params;
  params.shape = ShapeOf(workspace, config, inputs);
  params.ring_plan = PlanRing(params.shape, config, inputs.schedule);
  FillInputs(inputs, &params);
  FillExchange(workspace, inputs, &params);
  const ProgramShape program_shape = ProgramShapeOf(inputs, params.shape, params.ring_plan);
  MOK_ASSIGN_OR_RETURN(TaskProgram program, TaskProgram::Create(program_shape, params.table));
  pass->program.emplace(std::move(program));
  MOK_RETURN_IF_ERROR(FillScratch(workspace, inputs.pass, inputs.schedule, pass));

  const bool forward = inputs.pass == Pass::kForward;
  pass->record = workspace.NewRecord(forward ? Operation::kForward : Operation::kBackward);
  pass->record[AgreedField::kSchedule] = BitCast<int64_t>(inputs.schedule.fingerprint);
  pass->record[AgreedField::kIntermediate] = params.shape.intermediate;
  pass->record[AgreedField::kSharedIntermediate] = params.shape.shared_intermediate;
  pass->record[AgreedField::kSwigluLimit] = BitCast<uint32_t>(params.shape.swiglu_limit);
  pass->record[AgreedField::kIsa] = static_cast<int64_t>(config.isa);
  return OkStatus();
}

}  // namespace

Status PrepareForward(Workspace& workspace, const EngineConfig& config, const Schedule& schedule,
                      const MokForwardArgs& args, PreparedPass* pass) {
  MOK_RETURN_IF_ERROR(Prepare(
      workspace, config, {Pass::kForward, schedule, args.layer, args.context, nullptr, 1}, pass));
  pass->record[AgreedField::kDifferentiated] = args.differentiated;
  pass->params.clear_spare_rows = args.clear_spare_rows != 0;
  if (args.clear_spare_rows != 0) StageSpareBlocks(&pass->params);
  const LayerShape& shape = pass->params.shape;
  pass->params.tokens.reduced = Rows(args.out, shape.num_tokens, shape.hidden, shape.dtype);
  return OkStatus();
}

Status PrepareBackward(Workspace& workspace, const EngineConfig& config, const Schedule& schedule,
                       const MokBackwardArgs& args, PreparedPass* pass) {
  MOK_RETURN_IF_ERROR(Prepare(
      workspace, config,
      {Pass::kBackward, schedule, args.layer, args.context, args.d_out, args.kept_macrobatches},
      pass));
  PassParams& params = pass->params;
  const LayerShape& shape = params.shape;
  params.tokens.reduced = Rows(args.d_x, shape.num_tokens, shape.hidden, shape.dtype);
  params.tokens.d_topk_weight = args.d_topk_weight;
  params.tokens.d_shared_scale = args.d_shared_scale;
  params.d_routed =
      GradsOf(args.d_routed, schedule.table.num_local_experts, shape.intermediate, shape.hidden);
  params.d_shared = GradsOf(args.d_shared, 1, shape.shared_intermediate, shape.hidden);
  return OkStatus();
}

}  // namespace mok
