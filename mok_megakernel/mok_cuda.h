/* MoK on Hopper GPUs: the layer of mok.h as one kernel that builds the schedule and one each that
 * is the whole forward and the whole backward. Plain C, as mok.h, whose notation, structs, status
 * codes and mok_last_error() hold here too; tensors are bf16, router weights fp32.
 *
 * The library allocates nothing: the caller hands in all memory. As in mok.h, what a call writes
 * may not overlap anything else that it is given; that goes for scratch, for a schedule that is
 * built, and for the workspace's heap and state, in which only x may lie, at
 * MokCudaMemory.x_offset. Nothing here waits for the GPU (but for one small copy:
 * mok_cuda_workspace_create, mok_cuda_check_ranks), and no size depends on the routing, so that
 * calls can be captured into a CUDA graph and replayed with other expert ids, other tokens and
 * other weights in the same memory.
 *
 * Collective functions (schedule build, forward, backward) are called by every rank, in the same
 * order. The ranks meet on the GPUs: a rank that does not come makes the others' kernels end after
 * the timeout. What a kernel finds wrong is written to `records` and returned by mok_cuda_check,
 * which a caller asks before it builds a schedule:
 *   - an expert id outside [-1, E) on any rank, or ranks that disagree on max_tokens, H, I, Is, K,
 *     E or on who owns which experts: returned once, on every rank, by mok_cuda_check. Every rank
 *     refuses that schedule, and its outputs hold anything. With several ranks it goes for all that
 *     a rank calls before its mok_cuda_check has returned the error: nothing of it does anything or
 *     waits for anybody. Then the workspaces work on, the ranks in step whenever each has heard.
 *     Schedules from before the error cannot be used any more: a pass of one has no effect but that
 *     the next schedule is refused for it.
 *   - MOK_DEADLINE_EXCEEDED, by any call: the workspace is unusable from then on.
 *
 * A kernel holds its SMs while it waits for the other ranks. Where calls on two workspaces may run
 * at the same time, GPU 0 may therefore begin with one and GPU 1 with the other, and both wait
 * until the timeout: queue them in the same order on all ranks on one stream (or on streams that
 * follow each other), or give them SMs that suffice for both (MokCudaLayer.num_sms).
 */
#ifndef MOK_MEGAKERNEL_MOK_CUDA_H_
#define MOK_MEGAKERNEL_MOK_CUDA_H_

#include "mok_megakernel/mok.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MOK_CUDA_MAX_RANKS = 72, MOK_CUDA_ALIGNMENT = 256 };

/* ---- Workspace ---------------------------------------------------------------------------- */

/* What one rank keeps between calls. Shared by any number of layers and of live forwards; calls on
 * one workspace come from one thread at a time and are queued on streams that follow each other. */
typedef struct MokCudaWorkspace MokCudaWorkspace;

typedef struct MokCudaOptions {
  int64_t struct_size;
  int32_t rank;           /* [0, ep_size) */
  int32_t ep_size;        /* R in [1, MOK_CUDA_MAX_RANKS]; same on every rank */
  int64_t max_tokens;     /* the largest T of any rank in any call; same on every rank */
  int32_t hidden;         /* H, a multiple of 8; same on every rank */
  int32_t topk;           /* K >= 1; same on every rank */
  int32_t device;         /* CUDA ordinal of a GPU of compute capability 9.0 */
  int32_t num_sms;        /* of that GPU: >= 2 and at most what it has */
  double timeout_seconds; /* > 0: how long a rank waits for another one before it gives up. Longer
                             than the longest pass of any rank: what a kernel waits for on its own
                             GPU has bounds that are multiples of it */
} MokCudaOptions;

/* Memory that the caller provides, in bytes; each aligned to MOK_CUDA_ALIGNMENT. */
typedef struct MokCudaMemory {
  int64_t struct_size;
  int64_t heap_bytes;      /* of the symmetric heap: device memory that every rank can access */
  int64_t heap_zero_bytes; /* of its beginning that has to be zero before any rank makes a call */
  int64_t state_bytes;     /* device memory of this rank, zero */
  int64_t record_bytes;    /* page-locked host memory, mapped into the device, zero */
  int64_t x_offset;        /* of the staged x [max_tokens, H] in the heap, -1 if ep_size is 1. A
                              forward whose x lies there already saves the copy. Its backward may
                              be given x there, too, unless a forward or backward of this workspace
                              has been called in between with T > 0 and its x elsewhere, which is
                              copied there: then it returns MOK_FAILED_PRECONDITION. It cannot know
                              what the caller has written there since, nor what graphs copy that
                              are replayed (a call counts when it is captured) */
  int64_t error_scratch_bytes; /* device memory of one mok_cuda_report_error */
} MokCudaMemory;
MOK_API int32_t mok_cuda_memory(const MokCudaOptions* options, MokCudaMemory* memory);

typedef struct MokCudaAddresses {
  int64_t struct_size;
  void* const* heap_of_rank; /* [ep_size] as this rank's GPU addresses them; read by create only */
  void* state;
  void* records;
} MokCudaAddresses;

/* Not collective. Waits for one small copy to the GPU. MOK_UNAVAILABLE: the device cannot run the
 * kernels. */
MOK_API int32_t mok_cuda_workspace_create(const MokCudaOptions* options,
                                          const MokCudaAddresses* addresses,
                                          MokCudaWorkspace** workspace);
/* The memory has to outlive kernels that are still queued, and graphs. */
MOK_API void mok_cuda_workspace_destroy(MokCudaWorkspace* workspace);

/* MOK_OK, or what the kernels that have ended so far found wrong. Does not wait: synchronise first
 * to hear of those that are still queued. With an error that the workspace survives it queues on
 * `stream`, a cudaStream_t that is not being captured, what lets the calls that follow take part
 * again. Such an error is on every rank: nobody has to be told (mok_cuda_report_error). */
MOK_API int32_t mok_cuda_check(MokCudaWorkspace* workspace, void* stream);
/* Whether another rank has left for good (mok_cuda_report_error), which makes all workspaces
 * unusable. Waits for a small copy from the GPU, which is ordered after nothing: it has a stream
 * of its own. */
MOK_API int32_t mok_cuda_check_ranks(const MokCudaWorkspace* workspace);
/* Only what makes this rank's workspace unusable: a rank did not come, or this one has left. */
MOK_API int32_t mok_cuda_check_usable(const MokCudaWorkspace* workspace);

/* ---- A layer ------------------------------------------------------------------------------ */

/* The sizes of a layer on this rank, and how it runs. No field but the numbers of experts and the
 * widths changes a bit of any result. */
typedef struct MokCudaLayer {
  int64_t struct_size;
  int32_t num_local_experts;   /* El, at most 2048; may differ by rank */
  int32_t first_expert;        /* global id of local expert 0: the El of the ranks below, summed */
  int32_t num_experts;         /* E >= 0; same on every rank */
  int32_t intermediate;        /* I, a multiple of 8 */
  int32_t shared_intermediate; /* Is, a multiple of 8; 0: no shared expert */
  int32_t num_comm_sms;        /* SMs that only move rows; 0: warps beside the GEMM do it */
  int64_t num_tokens;          /* T of this call, in [0, max_tokens] */
  int64_t minibatch_rows;      /* rounded up to row blocks of 128 rows; 0: heuristic */
  int64_t macrobatch_rows;     /* rows of the ring, rounded up to row blocks; 0: heuristic, -1: all
                                  rows (nothing is recomputed by a backward) */
  int32_t num_sms;             /* SMs that a call occupies, num_comm_sms included; 0: all. All its
                                  blocks wait for each other: fewer leave room for kernels that it
                                  must not wait for, collectives on other streams */
  int32_t reserved;            /* 0 */
} MokCudaLayer;

typedef struct MokCudaLayerMemory {
  int64_t struct_size;
  int64_t ring_rows;      /* of a MokContext. Depends on max_tokens, or on T if R = 1. A rank
                             to which no route can lead (El = 0, or no tokens anywhere) may
                             pass a MokContext with ring_rows 0 and null ring pointers */
  int64_t schedule_bytes; /* device memory that a schedule fills */
  int64_t schedule_scratch_bytes; /* device memory of one mok_cuda_schedule_build */
  int64_t forward_scratch_bytes;  /* device memory of one mok_cuda_forward */
  int64_t backward_scratch_bytes; /* device memory of one mok_cuda_backward */
  /* Inside a schedule: int64 [2], row blocks of this rank and tokens of all ranks; int32 [El],
   * routes that lead to each local expert. */
  int64_t result_offset, expert_rows_offset;
} MokCudaLayerMemory;
MOK_API int32_t mok_cuda_layer_memory(const MokCudaWorkspace* workspace, const MokCudaLayer* layer,
                                      MokCudaLayerMemory* memory);

/* An upper bound of schedule_bytes / 4, linear in its sizes (in rows, experts and tokens), for
 * compilers that plan buffers symbolically:
 *   MOK_CUDA_SCHEDULE_HEADER_WORDS + 3 * El + 2 * capacity + 4 * ceil(capacity / 128) + tokens
 * with tokens = R * max_tokens, or T if R = 1; capacity = mok_schedule_capacity_rows(tokens; K;
 * El). */
enum { MOK_CUDA_SCHEDULE_HEADER_WORDS = 512 };

/* Which part of a call is queued. Ranks that are processes, each on its own GPU, use WHOLE. Ranks
 * that share a GPU and run one after the other queue every part for all ranks before the next part:
 * schedule STAGE, BUILD; forward STAGE, EXCHANGE, REDUCE. Stream order stands for their meetings.
 */
enum MokCudaPart {
  MOK_CUDA_WHOLE = 0,
  MOK_CUDA_STAGE = 1,
  MOK_CUDA_BUILD = 2,
  MOK_CUDA_EXCHANGE = 3,
  MOK_CUDA_REDUCE = 4
};

typedef struct MokCudaScheduleArgs {
  int64_t struct_size;
  const void* topk_idx;   /* [T, K] global expert ids, -1: no route. Aligned to 16 bytes */
  int32_t topk_idx_bytes; /* of an element: 4 or 8 */
  int32_t part;           /* MokCudaPart */
  void* schedule;         /* [schedule_bytes], written */
  void* scratch;          /* [schedule_scratch_bytes], free again when the kernel has run. The parts
                             of one call share it */
  void* stream;           /* cudaStream_t */
} MokCudaScheduleArgs;

/* Collective. Of the layer it reads the experts, num_tokens and macrobatch_rows (and, where that is
 * 0, what the heuristic looks at); the intermediate sizes, but for the heuristic only to compare
 * them with the other ranks'; and num_sms, which changes neither the schedule nor, but for the
 * heuristic, the size of its memory and scratch. The schedule serves any number of forwards with
 * the same T, R, K, experts and macrobatch, of this workspace. */
MOK_API int32_t mok_cuda_schedule_build(MokCudaWorkspace* workspace, const MokCudaLayer* layer,
                                        const MokCudaScheduleArgs* args);

typedef struct MokCudaForwardArgs {
  int64_t struct_size;
  MokLayer layer;
  MokContext context;     /* written */
  const void* topk_idx;   /* as given to the schedule: tells routes from "no route" */
  int32_t topk_idx_bytes; /* 4 or 8 */
  int32_t part;           /* MokCudaPart */
  const void* schedule;
  void* scratch; /* [forward_scratch_bytes], as in MokCudaScheduleArgs */
  void* out;     /* [T, H], written */
  void* stream;  /* cudaStream_t */
} MokCudaForwardArgs;

/* Collective: the whole layer. Tensors are aligned to 16 bytes. */
MOK_API int32_t mok_cuda_forward(MokCudaWorkspace* workspace, const MokCudaLayer* layer,
                                 const MokCudaForwardArgs* args);

typedef struct MokCudaBackwardArgs {
  int64_t struct_size;
  MokLayer layer;     /* as given to the forward */
  MokContext context; /* as left by the forward; overwritten: another backward of the same forward
                         needs kept_macrobatches = 0 */
  const void* topk_idx;
  int32_t topk_idx_bytes;
  int32_t part; /* MokCudaPart, as in a forward */
  const void* schedule;
  void* scratch; /* [backward_scratch_bytes] */
  void* stream;
  const void* d_out;         /* [T, H] */
  int32_t kept_macrobatches; /* see MokBackwardArgs */
  int32_t reserved;          /* 0 */
  void* d_x;                 /* [T, H], written */
  float* d_topk_weight;      /* fp32 [T, K], written; 0 where there is no route */
  float* d_shared_scale;     /* fp32 [T], written; null exactly when shared_scale is null */
  MokWeightGrads d_routed;   /* see MokBackwardArgs */
  MokWeightGrads d_shared;
} MokCudaBackwardArgs;

/* Collective: the gradients of every input of the layer. Tensors are aligned to 16 bytes. */
MOK_API int32_t mok_cuda_backward(MokCudaWorkspace* workspace, const MokCudaLayer* layer,
                                  const MokCudaBackwardArgs* args);

/* What the other ranks queue while this one cannot. */
enum MokCudaErrorPlace {
  MOK_CUDA_IN_SCHEDULE = 0, /* a schedule, and all forwards and backwards of it */
  MOK_CUDA_IN_PASS = 1      /* a forward or backward whose schedule this rank has built */
};

typedef struct MokCudaErrorArgs {
  int64_t struct_size;
  int32_t code;  /* a MokStatusCode other than MOK_OK, which the other ranks get too */
  int32_t place; /* MokCudaErrorPlace */
  void* scratch; /* [error_scratch_bytes] */
  void* stream;  /* cudaStream_t */
} MokCudaErrorArgs;

/* Takes the place of this rank's call when its caller has found an error, so that the other ranks
 * do not wait for it. All ranks have GPUs of their own.
 *
 * IN_SCHEDULE: all ranks refuse the batch as one with an invalid id; on the other ranks
 * mok_cuda_check returns `code` and names this rank.
 *
 * IN_PASS: this rank leaves for good, as the others have been promised rows of it. Its own calls
 * return MOK_FAILED_PRECONDITION from now on. Passes of the others do not wait for it any more, and
 * their outputs hold anything; mok_cuda_check_ranks, and mok_cuda_check after their next schedule,
 * return `code` and name this rank. */
MOK_API int32_t mok_cuda_report_error(MokCudaWorkspace* workspace, const MokCudaErrorArgs* args);

/* ---- Matrix product ----------------------------------------------------------------------- */

/* As mok_matmul, on a GPU of compute capability 9.0, 10.0 or 10.3: every sum runs over k in
 * ascending order with one rounding per term, so the bits of c(i, j) depend on its row of a and its
 * column of b only. num_threads and isa are ignored. */
MOK_API int32_t mok_cuda_matmul(const MokMatmulArgs* args, int32_t device, void* stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* MOK_MEGAKERNEL_MOK_CUDA_H_ */
