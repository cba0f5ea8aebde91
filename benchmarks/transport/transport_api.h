/* The transport kernels as a C interface, for the benchmark (ctypes). Calls return 0, or the number
   of a StatusCode with a text in mok_transport_error(). */
#ifndef MOK_BENCHMARKS_TRANSPORT_API_H_
#define MOK_BENCHMARKS_TRANSPORT_API_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Addresses are device memory; fields as in TransportParams and TransportLaunch. */
typedef struct MokTransportArgs {
  int32_t device;
  int32_t mechanism; /* 0: bulk copies, 1: vectors */
  int32_t side;      /* 0: pull, 1: push */
  int32_t arrival;   /* 0: untold, 1: counters of this GPU, 2: of the peer */
  int32_t num_blocks;
  int32_t warps;
  int32_t num_rows;
  int32_t rows_per_tile;
  int64_t row_bytes;
  const void* rank;          /* [num_rows] int32 */
  const void* row;           /* [num_rows] int32 */
  void* local;               /* [num_rows, row_bytes] */
  void* counters;            /* [tiles] uint64 */
  void* of_rank[8];          /* [rows there, row_bytes] */
  void* counters_of_rank[8]; /* [tiles] uint64 */
} MokTransportArgs;

/* A GPU's place for waits that run out. */
typedef struct MokTransport MokTransport;

/* Also lets kernels on `device` access the memory of every other device. */
int32_t mok_transport_create(int32_t device, MokTransport** transport);
int32_t mok_transport_launch(MokTransport* transport, const MokTransportArgs* args, void* stream);
/* Flags: uint64, 0 before. Launch it on both GPUs; begins: 1 on one of them. */
int32_t mok_transport_ping_pong(MokTransport* transport, void* own_flag, void* peer_flag,
                                int32_t rounds, int32_t begins, void* stream);
/* After synchronising: whether a wait of a kernel has run out of time. */
int32_t mok_transport_check(MokTransport* transport);
void mok_transport_destroy(MokTransport* transport);

/* Of this thread's last call that failed. */
const char* mok_transport_error(void);

#ifdef __cplusplus
}
#endif

#endif /* MOK_BENCHMARKS_TRANSPORT_API_H_ */
