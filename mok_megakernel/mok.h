/* MoK: one mixture-of-experts layer, forward and backward, over the ranks of one node.
 *
 * The public headers of the engine are this one and, for GPUs, mok_cuda.h. They are plain C:
 * integers, pointers and structs, no C++, no PyTorch, no Python. Notation of the shapes (row-major,
 * contiguous, elements of `dtype` unless a field says otherwise):
 *
 *   R   ranks ("EP size")            T   tokens of this rank (ranks may differ, 0 is fine)
 *   H   hidden size                  K   routes per token (top-k)
 *   I   intermediate size of a routed expert, Is of the shared expert (0: there is none)
 *   El  experts of this rank; E their sum over the ranks; rank 0 owns the first ids, and so on
 *
 * Forward, for a token t with routes (expert_k, weight_k), in fp32 from operands of `dtype`:
 *   g = x Wg^T, u = x Wu^T (rounded);  h = silu(g) * u (rounded);  y = h Wd^T (rounded);
 *   out[t] = round(shared_scale[t] * y_shared[t] + sum over k ascending of weight_k * y_k).
 *
 * Collective functions (schedule build, forward, backward) are called by every rank of the group,
 * in the same order. They begin with a handshake: if any rank's arguments are wrong, or ranks
 * disagree, *every* rank returns the same error before any output is written, and the next call
 * works. A rank that does not come makes the others return MOK_DEADLINE_EXCEEDED, naming it, after
 * the workspace's timeout; that workspace then returns the same error for ever.
 *
 * Same inputs give the same bits in every output, whatever the number of threads, the minibatch,
 * the macrobatch, recomputation, and the number of ranks over which the same global batch is
 * spread.
 *
 * Memory: tensors are aligned to their elements. What a call only reads may overlap: x may be
 * d_out, up may be gate. What it writes (outputs, gradients, the context, in a backward too) may
 * overlap nothing else that the call is given, not even in part: such calls are refused. Pointers
 * to nothing (no tokens, no expert, null) overlap nothing. Fields named `reserved` have to be 0.
 *
 * Every struct that a function is given begins with `struct_size` = sizeof(that struct), so that a
 * caller compiled against another version is refused instead of misread; structs inside these
 * (MokLayer, MokWeights, MokContext, MokWeightGrads) count in theirs. Every function that can fail
 * returns a MokStatusCode (but mok_schedule_capacity_rows); mok_last_error() then holds the text.
 */
#ifndef MOK_MEGAKERNEL_MOK_H_
#define MOK_MEGAKERNEL_MOK_H_

#include <stdint.h>

#if defined(__GNUC__)
#define MOK_API __attribute__((visibility("default")))
#else
#define MOK_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever a struct or a function changes its meaning. */
#define MOK_API_VERSION 2
MOK_API int32_t mok_api_version(void);

enum MokStatusCode {
  MOK_OK = 0,
  MOK_INVALID_ARGUMENT = 1,    /* wrong shape or value; ranks that disagree */
  MOK_TYPE_MISMATCH = 2,       /* wrong dtype */
  MOK_OUT_OF_RANGE = 3,        /* an expert id outside [-1, E) */
  MOK_FAILED_PRECONDITION = 4, /* an object used in the wrong state */
  MOK_DEADLINE_EXCEEDED = 5,   /* a rank did not come within the timeout */
  MOK_ABORTED = 6,             /* given up because another worker failed first */
  MOK_RESOURCE_EXHAUSTED = 7,  /* memory or shared memory */
  MOK_UNAVAILABLE = 8,         /* this machine lacks something, for example an ISA */
  MOK_UNIMPLEMENTED = 9,
  MOK_INTERNAL = 10
};

/* Limits that no machine reaches: beyond them a size is taken for a mistake. No tensor may take
 * more than 2^45 bytes. */
enum { MOK_MAX_RANKS = 1024, MOK_MAX_THREADS = 1024, MOK_MAX_LOCAL_EXPERTS = 1048576 };

enum MokDType { MOK_BF16 = 0, MOK_FP32 = 1 };

/* The collective operations, as named by the handshake and by mok_workspace_report_error. */
enum MokOperation { MOK_OP_SCHEDULE = 1, MOK_OP_FORWARD = 2, MOK_OP_BACKWARD = 3 };

/* The text of the last error of the calling thread ("" if its last call succeeded). Valid until
 * the thread's next call. */
MOK_API const char* mok_last_error(void);

/* ---- This machine ------------------------------------------------------------------------- */

/* Instruction sets in ascending order: 0 portable, 1 AVX2+FMA, 2 AVX-512, 3 AVX-512 BF16. */
enum { MOK_NUM_ISAS = 4 };
MOK_API const char* mok_isa_name(int32_t isa);  /* "unknown" outside [0, MOK_NUM_ISAS) */
MOK_API int32_t mok_isa_supported(int32_t isa); /* 1 or 0 */
MOK_API int32_t mok_best_isa(void);
/* Cores this process may run on, at least 1. */
MOK_API int32_t mok_num_cores(void);

/* ---- Trace -------------------------------------------------------------------------------- */

typedef struct MokTrace MokTrace; /* one rank's record of task kind, begin and end per worker */

/* Keeps the first `events_per_worker` tasks of each of `num_workers` workers (threads plus
 * communication threads, at most 2 * MOK_MAX_THREADS); later ones are counted, not kept. */
MOK_API int32_t mok_trace_create(int32_t num_workers, int64_t events_per_worker, MokTrace** trace);
MOK_API void mok_trace_destroy(MokTrace* trace);
/* Writes the events in Chrome's trace format (chrome://tracing, Perfetto). Not while a pass runs.
 */
MOK_API int32_t mok_trace_write(const MokTrace* trace, const char* path);

/* ---- Workspace ---------------------------------------------------------------------------- */

/* Ranks that are threads of one process (tests, or one process that drives several ranks). Each
 * rank creates its workspace with the same group; the group may be destroyed as soon as all ranks
 * have done so. */
typedef struct MokInProcessGroup MokInProcessGroup;
MOK_API int32_t mok_in_process_group_create(int32_t ep_size, MokInProcessGroup** group);
MOK_API void mok_in_process_group_destroy(MokInProcessGroup* group);

typedef struct MokWorkspaceOptions {
  int64_t struct_size;
  int32_t rank;    /* [0, ep_size) */
  int32_t ep_size; /* R in [1, MOK_MAX_RANKS] */
  /* Exactly one of the next two when ep_size > 1; both null when ep_size is 1. */
  const char* heap_name; /* POSIX shared memory, ranks are processes of one machine: a name of 1 to
                            64 characters without '/' that only this group uses (it leaves nothing
                            in /dev/shm behind) */
  MokInProcessGroup* group; /* ranks are threads of this process */
  int64_t max_tokens;       /* the largest T of any rank in any call >= 0; same on every rank */
  int32_t hidden;           /* H, a multiple of 8; same on every rank */
  int32_t topk;             /* K >= 1; same on every rank */
  int32_t dtype;            /* MokDType of activations and weights; same on every rank */
  int32_t reserved;         /* 0 */
  double timeout_seconds;   /* > 0: how long a rank waits for another one before it gives up */
} MokWorkspaceOptions;

/* One rank's symmetric heap, scratch memory and worker threads. Shared by any number of layers and
 * of live forwards; calls on one workspace run one after the other (a lock sees to it). */
typedef struct MokWorkspace MokWorkspace;

/* Collective for heap_name (returns when every rank has come). Not usable across fork(). */
MOK_API int32_t mok_workspace_create(const MokWorkspaceOptions* options, MokWorkspace** workspace);
MOK_API void mok_workspace_destroy(MokWorkspace* workspace);

/* MOK_OK, or the error that made the workspace unusable (a rank that did not come). */
MOK_API int32_t mok_workspace_check(const MokWorkspace* workspace);

typedef struct MokWorkspaceInfo {
  int64_t struct_size;
  int64_t heap_bytes;    /* of this rank's symmetric heap */
  int64_t scratch_bytes; /* reserved so far; grows with the largest ring and intermediate size */
  int32_t num_threads;   /* worker threads started so far, the caller's own not counted */
  int32_t reserved;      /* written: 0 */
} MokWorkspaceInfo;
MOK_API int32_t mok_workspace_info(const MokWorkspace* workspace, MokWorkspaceInfo* info);

/* For tests: fills the scratch memory and the data of this rank's heap with NaN. */
MOK_API int32_t mok_workspace_poison(MokWorkspace* workspace);

/* Joins the next collective, which the other ranks enter as `operation`, with an error found by the
 * caller (its own argument checks), so that they return it instead of waiting for this rank.
 * code: a MokStatusCode other than MOK_OK. Returns that code (or a timeout's). */
MOK_API int32_t mok_workspace_report_error(MokWorkspace* workspace, int32_t operation, int32_t code,
                                           const char* message);

/* ---- Engine configuration ----------------------------------------------------------------- */

/* May differ by rank and by call: no field changes a bit of any result. */
typedef struct MokEngineConfig {
  int64_t struct_size;
  int32_t num_threads;      /* compute workers, up to MOK_MAX_THREADS; 0: the cores of this process
                               divided by ep_size */
  int32_t num_comm_threads; /* workers that only move rows; 0: compute workers do it in turn */
  int64_t minibatch_rows;   /* unit of overlap of exchange and compute, rounded up to row blocks of
                               128 rows; 0: chosen by each pass. Read by mok_schedule_build */
  int64_t macrobatch_rows;  /* rows of the ring, rounded up to row blocks; 0: heuristic, -1: all
                               rows (nothing is ever recomputed). Read by mok_schedule_build */
  int32_t isa;              /* -1: best, else see mok_isa_name. Ranks must take the same one for the
                               results to have the same bits */
  int32_t reserved;         /* 0 */
  MokTrace* trace;          /* null: no trace. Read by forward and backward */
} MokEngineConfig;

/* ---- Schedule ----------------------------------------------------------------------------- */

/* Who computes which row, for one routing of one batch. Immutable once built: any number of
 * forwards and backwards may use it, of several layers too, with the workspace that built it or any
 * other of the same rank, R and K with room for the tokens. It may outlive its workspace. */
typedef struct MokSchedule MokSchedule;

typedef struct MokScheduleArgs {
  int64_t struct_size;
  const int64_t* topk_idx; /* [T, K] global expert ids, -1: no route. An expert may appear twice */
  int64_t num_tokens;      /* T in [0, max_tokens] */
  int32_t num_local_experts; /* El in [0, MOK_MAX_LOCAL_EXPERTS]; may differ by rank, E >= 1 */
  int32_t num_experts;       /* E, to be checked; same on every rank. 0: what the El add up to */
} MokScheduleArgs;

/* Collective. An id outside [-1, E) is an error on every rank that names the rank, token, k, id and
 * the valid range. */
MOK_API int32_t mok_schedule_build(MokWorkspace* workspace, const MokEngineConfig* config,
                                   const MokScheduleArgs* args, MokSchedule** schedule);
MOK_API void mok_schedule_destroy(MokSchedule* schedule);

typedef struct MokScheduleInfo {
  int64_t struct_size;
  int64_t num_tokens;        /* T of this rank */
  int64_t num_tokens_total;  /* over all ranks */
  int32_t num_experts;       /* E */
  int32_t num_local_experts; /* El */
  int32_t first_expert;      /* global id of local expert 0 */
  int32_t num_macrobatches;  /* 0 when no route leads here; forward keeps macrobatch 0 in the ring,
                                backward recomputes the others */
  int64_t num_rows;          /* routes that lead to this rank, without padding */
  int64_t num_row_blocks;    /* blocks of 128 rows, padding included */
  int64_t minibatch_rows;    /* 0: chosen by each pass */
  int64_t ring_rows; /* rows of the ring buffers of a MokContext; depends on shapes only, not
                        on the routing */
} MokScheduleInfo;
MOK_API int32_t mok_schedule_info(const MokSchedule* schedule, MokScheduleInfo* info);
/* counts: int64 [El], routes that lead to each local expert. */
MOK_API int32_t mok_schedule_tokens_per_expert(const MokSchedule* schedule, int64_t* counts);

/* A schedule as plain memory, for frameworks that own every buffer between forward and backward.
 * Words are int32 in this machine's byte order; a saved schedule takes at most
 * MOK_SCHEDULE_HEADER_WORDS + 2 * El + 2 * capacity + T * K words, where capacity, the rows of the
 * worst case, is mok_schedule_capacity_rows(tokens of all ranks, K, El); that returns -1, and
 * mok_last_error() holds the text, for a negative argument or rows that do not fit int64. */
#define MOK_SCHEDULE_HEADER_WORDS 64
MOK_API int64_t mok_schedule_capacity_rows(int64_t num_tokens_total, int32_t topk,
                                           int32_t num_local_experts);
/* Needs num_words >= what the schedule takes, else MOK_INVALID_ARGUMENT; the rest of words is left
 * alone. */
MOK_API int32_t mok_schedule_save(const MokSchedule* schedule, int32_t* words, int64_t num_words);
/* A schedule equal to the one saved; not collective. Words that no save has written are
 * MOK_INVALID_ARGUMENT. */
MOK_API int32_t mok_schedule_load(const int32_t* words, int64_t num_words, MokSchedule** schedule);

/* ---- Forward and backward ----------------------------------------------------------------- */

/* The routed experts of this rank ([El, ...]) or the shared expert (no leading dimension). */
typedef struct MokWeights {
  const void* gate;     /* [El, I, H]; shared: [Is, H] */
  const void* up;       /* as gate */
  const void* down;     /* [El, H, I]; shared: [H, Is] */
  int64_t intermediate; /* I or Is, a multiple of 8; 0, with null pointers: no shared expert */
} MokWeights;

/* What the forward leaves for the backward. Caller-owned, one per live forward; also the ring in
 * which both passes work. Its contents need no initialisation: rows that hold no route are never
 * read. */
typedef struct MokContext {
  int64_t ring_rows; /* rows of the next three, at least MokScheduleInfo.ring_rows */
  void* ring_x;      /* [ring_rows, H] rows of x of the macrobatch in the ring */
  void* ring_gate;   /* [ring_rows, I] g */
  void* ring_up;     /* [ring_rows, I] u */
  void* shared_gate; /* [T, Is] g of the shared expert; null without one */
  void* shared_up;   /* [T, Is] u */
} MokContext;

/* The layer as both passes see it. */
typedef struct MokLayer {
  const void* x;             /* [T, H] */
  const float* topk_weight;  /* fp32 [T, K] router weights; entries of routes -1 are ignored */
  MokWeights routed;         /* I must be the same on every rank */
  MokWeights shared;         /* Is must be the same on every rank */
  const float* shared_scale; /* fp32 [T] factor of the shared expert's output; null: 1.
                                Null without a shared expert */
  float swiglu_limit; /* c > 0: g -> min(g, c), u -> clip(u, -c, c); <= 0 or inf: plain SwiGLU */
  float reserved;     /* 0 */
} MokLayer;

typedef struct MokForwardArgs {
  int64_t struct_size;
  MokLayer layer;
  MokContext context; /* written */
  void* out;          /* [T, H], written */
  /* 1: the caller's automatic differentiation will run the backward of this call; the same on
   * every rank, because a rank that did not would let the others wait in their backward. 0: it
   * does not, or the caller sees to that itself. Changes nothing else. */
  int32_t differentiated;
  /* 1: rows of the context's ring that hold no route are set to zero, so that the context is a
   * function of the inputs whatever its memory held; its pointers are needed then even if no route
   * leads to this rank. 0: they are left alone, and pages of a sparse
   * ring that no route needs stay untouched. No pass reads them. */
  int32_t clear_spare_rows;
} MokForwardArgs;

/* Collective: the whole layer. On an error out and the context hold anything. */
MOK_API int32_t mok_forward(MokWorkspace* workspace, const MokEngineConfig* config,
                            const MokSchedule* schedule, const MokForwardArgs* args);

/* Weight gradients, same shapes as the MokWeights. Experts without rows: exact zeros, or untouched
 * when accumulating. Null pointers skip the gradient of that weight. */
typedef struct MokWeightGrads {
  void* gate;
  void* up;
  void* down;
  int32_t dtype; /* MokDType of the three; MOK_FP32 is allowed in a bf16 layer, not the reverse */
  int32_t accumulate; /* 0: written; 1: added to what is there, in fp32, rounded once */
} MokWeightGrads;

typedef struct MokBackwardArgs {
  int64_t struct_size;
  MokLayer layer; /* as given to the forward */
  /* As left by the forward; its ring is overwritten when there are several macrobatches. A ring
   * whose rows are not x's is refused (a sample is read). */
  MokContext context;
  const void* d_out; /* [T, H] */
  /* 1: the context is the forward's. 0: its contents are lost (activation checkpointing, or a ring
   * that a backward has consumed): everything is recomputed from x. Same bits. */
  int32_t kept_macrobatches;
  int32_t reserved;      /* 0 */
  void* d_x;             /* [T, H], written */
  float* d_topk_weight;  /* fp32 [T, K], written; 0 where there is no route */
  float* d_shared_scale; /* fp32 [T], written; null exactly when shared_scale is null */
  MokWeightGrads d_routed;
  MokWeightGrads d_shared; /* null pointers without a shared expert */
} MokBackwardArgs;

/* Collective: the gradients of every input of the layer. */
MOK_API int32_t mok_backward(MokWorkspace* workspace, const MokEngineConfig* config,
                             const MokSchedule* schedule, const MokBackwardArgs* args);

/* ---- Matrix product ----------------------------------------------------------------------- */

enum MokMatmulLayout {
  MOK_MATMUL_NT = 0, /* c = a b^T:  a [m, k], b [n, k] */
  MOK_MATMUL_NN = 1, /* c = a b:    a [m, k], b [k, n] */
  MOK_MATMUL_TN = 2  /* c = a^T b:  a [k, m], b [k, n] */
};

/* One fp32 product of row-major, contiguous matrices, for the router's linear layer. */
typedef struct MokMatmulArgs {
  int64_t struct_size;
  int32_t layout;      /* MokMatmulLayout */
  int32_t num_threads; /* 0: the cores of this process */
  int32_t isa;         /* -1: best, else see mok_isa_name */
  int32_t reserved;    /* 0 */
  int64_t m, n, k;     /* 0 to 2^31 - 1 */
  const float* a;
  const float* b;
  float* c; /* [m, n], written */
} MokMatmulArgs;

/* Needs no workspace and is not collective. The bits of c(i, j) depend on its row of a, its column
 * of b, k and the ISA only: a token's logits do not depend on the other tokens of the call. */
MOK_API int32_t mok_matmul(const MokMatmulArgs* args);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* MOK_MEGAKERNEL_MOK_H_ */
