// What the host sides of both passes have in common: kernels, the memory that passes share, tensor
// maps, launch, report. Through the host seam, so that the same code serves CUDA and the emulator.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mok_comm/sm90/exchange_params.h"
#include "mok_core/device/types.h"
#include "mok_core/device/wait_record.h"
#include "mok_core/dtype.h"
#include "mok_core/status.h"
#include "mok_gemm/sm90/tensor_maps.h"
#include "mok_megakernel/sm90/forward_config.h"
#include "mok_megakernel/sm90/pass_params.h"

namespace mok {

// What a launch needs to know of a kernel.
struct PassKernelInfo {
  const void* address;
  size_t shared_bytes;
  int32_t tile_columns;  // of its GEMM
  uint32_t max_chunk_bytes, max_dedicated_chunk_bytes;
  bool traces;  // fills the trace of the parameters; else they have none
};

struct PassLaunch {
  PassMode mode = PassMode::kWhole;
  int32_t num_blocks = 1;
  int device = 0;
  void* stream = nullptr;
};

// Where the parts of one allocation lie, each 256-byte aligned, in the order of Place.
class MemoryPlan {
 public:
  size_t bytes() const { return bytes_; }
  // The offset of a part.
  size_t Place(int64_t bytes);

 private:
  size_t bytes_ = 0;
};

// Memory that all passes of a rank share. Zero it once.
struct PassMemory {
  PassState* state;
  uint32_t* abort_flag;
  uint64_t* counters;
};

// It begins the scratch of either pass, at the same places and with the counters of whichever pass
// has more, so that one allocation can serve as scratch of both.
class PassMemoryLayout {
 public:
  PassMemoryLayout(const ForwardLayerShape& shape, const ForwardConfig& config);
  size_t bytes() const { return plan_.bytes(); }
  int64_t num_counters() const { return num_counters_; }
  PassMemory At(void* base) const;

 private:
  int64_t num_counters_;
  MemoryPlan plan_;
  size_t state_, abort_flag_, counters_;
};

// The signals of the parameters. Waits for the counters of this GPU are twice as
// patient as the meetings.
PassSignals MakePassSignals(const PassMemory& memory, DeviceWaitRecord* record, uint64_t timeout_ns,
                            int32_t rank);

// Tensors are aligned to this, as tensor maps and vectors of 16 bytes need it.
inline constexpr int64_t kTensorAlignment = 16;
Status CheckTensor(const char* name, const void* pointer);
Status CheckChunks(const ForwardConfig& config, const PassKernelInfo& kernel);

// ceil(width / columns).
int32_t TilesOf(int64_t width, int64_t columns);

// How many of `rows` rows that wait to be sent have memory: none on a rank alone, whose rows are
// all its own (OwnRowsOf).
constexpr int64_t RowsToSend(const ForwardLayerShape& shape, int64_t rows) {
  return shape.ep_size > 1 ? rows : 0;
}

// A map of rows that the kernel loads, or of one row of `spare` memory if there is none.
Status EncodeRows(const BFloat16* base, int64_t rows, int64_t columns, const BFloat16* spare,
                  TensorMap& map);
// A map of weights as the forward loads them; none where there are no experts, since no task loads
// them.
Status EncodeWeights(const WeightMatrix& matrix, ColumnOrder order, int32_t half_columns,
                     TensorMap& map);

// Rows of `hidden` bf16 between ranks: what all directions have in common.
RowExchange MakeRowExchange(const RowSources& sources, int64_t hidden, int32_t own_rank);

// Launches kernel(params). num_comm_sms: of the parameters.
Status LaunchPass(const PassKernelInfo& kernel, const PassLaunch& launch, int32_t num_comm_sms,
                  const void* params, size_t params_bytes, const char* name);

// Ok, or kDeadlineExceeded: names the missing rank if it was a meeting that ran out of time. After
// the kernel has ended.
Status CheckPassRecord(const DeviceWaitRecord& record);

}  // namespace mok
