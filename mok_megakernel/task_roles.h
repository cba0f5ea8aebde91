// One function per kind of task: what a worker does once the task's waits hold. The caller (the
// executor) waits before and signals after; nothing here waits, signals or allocates.
//
// Rows of padding are neither read nor written by any of them: a row block is worked on up to its
// last valid row, so that the memory behind may hold anything.
#pragma once

#include "mok_gemm/host/tile_worker.h"
#include "mok_megakernel/pass_params.h"
#include "mok_schedule/program_shape.h"
#include "mok_schedule/task.h"

namespace mok {

// Tiles per row block, token block or expert, as the roles cut them.
struct TileCounts {
  int32_t token_reduce = 1;         // TokenReduce: per token block
  int32_t intermediate = 0;         // GateUp, DownGrad: over I
  int32_t hidden = 0;               // Down, InputGrad: over H
  int32_t weight_grad_down = 0;     // per expert
  int32_t weight_grad_gate_up = 0;  // per expert: gate and up alternate
  int32_t shared_intermediate = 0;  // the shared expert's; 0 without one
  int32_t shared_weight_grad_down = 0;
  int32_t shared_weight_grad_gate_up = 0;
};
TileCounts CountTiles(const LayerShape& shape);

// Exchange. By reader: row blocks are pulled from and pushed to the source ranks.
void RunDispatch(const PassParams& params, const Task& task);
void RunCombine(const PassParams& params, const Task& task);
void RunReverseCombine(const PassParams& params, const Task& task);
void RunReverseDispatch(const PassParams& params, const Task& task);

// Forward. Recomputation runs the same GateUp; `h` goes to where the pass has room for it.
void RunGateUp(const PassParams& params, const UntypedMatrix& h, const Task& task,
               TileWorker& worker);
void RunDown(const PassParams& params, const Task& task, TileWorker& worker);
void RunSharedGateUp(const PassParams& params, const UntypedMatrix& h, const Task& task,
                     TileWorker& worker);
void RunSharedDown(const PassParams& params, const Task& task, TileWorker& worker);
void RunForwardReduce(const PassParams& params, const Task& task);

// Backward.
void RunDownGrad(const PassParams& params, const Task& task, TileWorker& worker);
void RunInputGrad(const PassParams& params, const Task& task, TileWorker& worker);
void RunSharedDownGrad(const PassParams& params, const Task& task, TileWorker& worker);
void RunSharedInputGrad(const PassParams& params, const Task& task, TileWorker& worker);
void RunBackwardReduce(const PassParams& params, const Task& task);

// Weight gradients.
void RunWeightGradDown(const PassParams& params, const WeightGradPiece& piece, const Task& task,
                       TileWorker& worker);
void RunWeightGradGateUp(const PassParams& params, const WeightGradPiece& piece, const Task& task,
                         TileWorker& worker);
void RunSharedWeightGradDown(const PassParams& params, const Task& task, TileWorker& worker);
void RunSharedWeightGradGateUp(const PassParams& params, const Task& task, TileWorker& worker);

}  // namespace mok
