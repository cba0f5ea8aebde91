/* The grouped GEMM of mok_gemm/sm90 as a C interface, for the benchmark (ctypes). Calls return 0,
   or the number of a StatusCode with a text in mok_grouped_gemm_error(). */
#ifndef MOK_BENCHMARKS_GROUPED_GEMM_API_H_
#define MOK_BENCHMARKS_GROUPED_GEMM_API_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Addresses are device memory; shapes as in GroupedGemmProblem (mok_gemm/sm90/grouped_gemm.h). */
typedef struct MokGroupedGemmArgs {
  int32_t device;
  int32_t swiglu;           /* 0: out = A B^T; 1: gate, up and out = silu(gate) * up */
  int32_t column_order;     /* 0: natural, 1: permuted (width a multiple of 32) */
  int32_t num_blocks;       /* of the grid, one per SM */
  int32_t max_panel_blocks; /* 0: the default */
  float swiglu_limit;
  int64_t rows, k, width, experts;
  const void* a;            /* [rows, k] bf16 */
  const void* expert_begin; /* [experts] int32 */
  const void* expert_count; /* [experts] int32 */
  const void* weights;      /* [experts, width, k] bf16 */
  const void* weights_up;   /* [experts, width, k] bf16, swiglu only */
  void* out;                /* [rows, width] bf16 */
  void* gate;               /* [rows, width] bf16, swiglu only */
  void* up;                 /* [rows, width] bf16, swiglu only */
} MokGroupedGemmArgs;

typedef struct MokGroupedGemm MokGroupedGemm;

/* The buffers have to outlive the plan. */
int32_t mok_grouped_gemm_create(const MokGroupedGemmArgs* args, MokGroupedGemm** plan);
int32_t mok_grouped_gemm_launch(MokGroupedGemm* plan, void* stream);
/* After synchronising: whether a wait of the kernel has run out of time. */
int32_t mok_grouped_gemm_check(MokGroupedGemm* plan);
void mok_grouped_gemm_destroy(MokGroupedGemm* plan);

/* Of this thread's last call that failed. */
const char* mok_grouped_gemm_error(void);

#ifdef __cplusplus
}
#endif

#endif /* MOK_BENCHMARKS_GROUPED_GEMM_API_H_ */
