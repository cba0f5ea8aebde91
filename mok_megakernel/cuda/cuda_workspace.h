// One rank's CUDA workspace: what it keeps between calls, and the calls. Through the host seam, so
// that it serves the emulator too.
#pragma once

#include <array>
#include <cstddef>

#include "mok_core/status.h"
#include "mok_megakernel/cuda/call_checks.h"
#include "mok_megakernel/cuda/layer_plan.h"
#include "mok_megakernel/cuda/workspace_layout.h"
#include "mok_megakernel/layer_checks.h"
#include "mok_megakernel/mok_cuda.h"

namespace mok {

class CudaWorkspace {
 public:
  // Addresses are checked; heap_of_rank has R of them.
  static StatusOr<CudaWorkspace> Create(const CudaWorkspaceShape& shape, void* const* heap_of_rank,
                                        void* state, CudaRecords* records);

  const CudaWorkspaceShape& shape() const { return shape_; }

  // The first wait that ran out of time, or that this rank has left; for ever.
  Status CheckUsable() const;
  // The same, or else an error that all ranks' schedule kernels found, once; then also queues what
  // lets this rank take part again.
  Status Check(void* stream);
  // Whether another rank has left for good. Waits for a copy.
  Status CheckRanks() const;

  Status BuildSchedule(const MokCudaLayer& layer, const MokCudaScheduleArgs& args);
  Status Forward(const MokCudaLayer& layer, const MokCudaForwardArgs& args);
  Status Backward(const MokCudaLayer& layer, const MokCudaBackwardArgs& args);
  Status ReportError(const MokCudaErrorArgs& args);

 private:
  CudaWorkspace(const CudaWorkspaceShape& shape, void* const* heap_of_rank, void* state,
                CudaRecords* records);

  // No heap begins in this rank's, or where another one does, and the state lies elsewhere.
  Status CheckHeaps() const;
  // Only what kernels waited for in vain.
  Status CheckWaits() const;
  Status CheckScheduleWait() const;

  void* own_heap() const { return heap_of_rank_[static_cast<size_t>(shape_.rank)]; }
  // What all launches of the schedule kernel have in common.
  ScheduleParams CommonScheduleParams(const CudaLayerPlan& plan, const MokCudaLayer& layer) const;
  StatusOr<ScheduleParams> MakeScheduleParams(const CudaLayerPlan& plan, const MokCudaLayer& layer,
                                              const MokCudaScheduleArgs& args) const;
  // See RefusalState.
  Status Resume(void* stream) const;
  // Checks what forward and backward have in common, and plans the layer.
  template <class Args>
  StatusOr<CudaLayerPlan> PlanPass(const MokCudaLayer& layer, const Args& args) const {
    MOK_RETURN_IF_ERROR(CheckPart(args.part, MOK_CUDA_EXCHANGE, MOK_CUDA_REDUCE));
    MOK_RETURN_IF_ERROR(CheckUsable());
    MOK_ASSIGN_OR_RETURN(CudaLayerPlan plan, PlanCudaLayer(shape_, layer));
    MOK_RETURN_IF_ERROR(CheckPass(plan, layer, args));
    return plan;
  }
  // What the arguments of both passes take from the workspace: peers' memory, what lives on between
  // passes (at the same places for every layer), the record. to.tokens and to.scratch come before.
  template <class Arguments>
  void FillFromWorkspace(const CudaLayerPlan& plan, const void* schedule, Arguments& to) const {
    to.peers.rank = shape_.rank;
    for (int32_t rank = 0; rank < shape_.ep_size; ++rank) {
      void* heap = heap_of_rank_[static_cast<size_t>(rank)];
      const bool own = rank == shape_.rank;
      to.peers.x_of_rank[rank] = own ? to.tokens.x : heap_.At<BFloat16>(heap, CudaHeapLayout::kX);
      to.peers.routes_of_rank[rank] = heap_.At<BFloat16>(heap, CudaHeapLayout::kRoutes);
      to.peers.flags_of_rank[rank] = heap_.At<uint64_t>(heap, CudaHeapLayout::kFlags);
    }
    to.schedule = plan.schedule.At(const_cast<void*>(schedule));
    static_cast<PassMemory&>(to.scratch) = SharedPassMemory(plan);
    to.record = &records_->pass_wait;
    to.timeout_ns = shape_.timeout_ns;
  }
  PassMemory SharedPassMemory(const CudaLayerPlan& plan) const {
    return plan.pass_memory.At(state_layout_.At<void>(state_, CudaStateLayout::kPasses));
  }

  // Where x has to lie for other ranks, and whether the caller's does already.
  bool IsInHeap(const void* x, int64_t num_tokens) const {
    return shape_.ep_size > 1 && num_tokens > 0 &&
           x == heap_.At<void>(own_heap(), CudaHeapLayout::kX);
  }
  // The x of a call that is about to be queued comes to lie in the heap, in place of any other's.
  void NoteX(const void* x, int64_t num_tokens) {
    if (shape_.ep_size > 1 && num_tokens > 0) holds_callers_x_ = IsInHeap(x, num_tokens);
  }
  LayerSizes SizesOf(const MokCudaLayer& layer) const {
    return {layer.num_tokens, shape_.hidden, shape_.topk, layer.num_local_experts,
            sizeof(BFloat16)};
  }
  // The heap and the state, which every call writes.
  CallMemory OwnMemory() const;
  // What a forward and a backward have in common: all but scratch, d_out and what they write.
  template <class Args>
  CallMemory MemoryOf(const LayerSizes& sizes, const CudaLayerPlan& plan, const Args& args) const {
    CallMemory memory = OwnMemory();
    AddStaged("x", args.layer.x, sizes.rows(), CudaHeapLayout::kX, memory);
    AddStaged("topk_weight", args.layer.topk_weight, sizes.routes(), CudaHeapLayout::kTopkWeight,
              memory);
    memory.Reads("topk_idx", args.topk_idx, {sizes.num_tokens, sizes.topk, args.topk_idx_bytes});
    memory.Reads("schedule", args.schedule, BytesOf(plan.schedule.bytes()));
    AddLayer(sizes, args.layer, args.context, memory);
    return memory;
  }
  // A tensor that may lie in the heap where it would be copied to, and nowhere else in it.
  void AddStaged(const char* name, const void* tensor, const MatrixSize& size,
                 CudaHeapLayout::Part part, CallMemory& memory) const {
    const bool is_staged = shape_.ep_size > 1 && tensor == heap_.At<void>(own_heap(), part);
    if (!is_staged) memory.Reads(name, tensor, size);
  }
  // Whether a backward finds its forward's x where that has read it.
  Status CheckXOfBackward(const void* x, int64_t num_tokens) const;
  Status StageX(const MokCudaForwardArgs& args, int64_t num_tokens, int32_t num_sms) const;
  ForwardArguments Arguments(const CudaLayerPlan& plan, const MokCudaLayer& layer,
                             const MokCudaForwardArgs& args) const;

  Status StageBackward(const BackwardParams& pass, const MokCudaBackwardArgs& args,
                       int32_t num_sms) const;
  BackwardArguments ArgumentsOfBackward(const CudaLayerPlan& plan, const MokCudaLayer& layer,
                                        const MokCudaBackwardArgs& args) const;

  // part: WHOLE, or first STAGE and in a later call BUILD.
  Status ReportInSchedule(const MokCudaErrorArgs& args, int32_t part) const;
  Status Leave(int32_t code, void* stream) const;

  CudaWorkspaceShape shape_;
  // The x in this rank's heap is what its caller wrote there for the last forward or backward; else
  // one of them has copied its own.
  bool holds_callers_x_ = false;
  // This rank takes part in no call any more.
  bool has_left_ = false;
  // Its word for the next schedule of the others lies ready.
  bool reported_ahead_ = false;
  CudaHeapLayout heap_;
  CudaStateLayout state_layout_;
  std::array<void*, MOK_CUDA_MAX_RANKS> heap_of_rank_ = {};
  void* state_;
  CudaRecords* records_;
};

}  // namespace mok
