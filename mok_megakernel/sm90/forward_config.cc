#include "mok_megakernel/sm90/forward_config.h"

#include <algorithm>

#include "mok_comm/sm90/exchange_params.h"
#include "mok_core/argument_checks.h"
#include "mok_core/bits.h"
#include "mok_gemm/sm90/tensor_maps.h"
#include "mok_schedule/ring_plan.h"
#include "mok_schedule/routing_table.h"

namespace mok {
namespace {

constexpr int64_t kMaxChunkBytes = 8192;
constexpr int64_t kMaxDedicatedChunkBytes = 8192;
constexpr int32_t kTileColumns = 256;
// 16 rows per exchange task: a release per 16 to 32 chunks, and a warp still has several tasks.
constexpr int32_t kExchangeTiles = 8;
constexpr int32_t kTokenReduceTiles = 16;  // eight tokens: one for each consumer warp
constexpr int32_t kFusedReduceWidth = 2;   // fewer tasks, and what is known of a token serves twice
// A wave of tiles of 128 x 256 is about a square, and shares most operands in L2, when it has as
// many column tiles as row blocks: a panel of row blocks for twelve columns (11 of 132 SMs). The
// first rows of a panel leave before the next is computed.
constexpr int32_t kPanelTiles = 12;
// GateUp has no rows to send: a wave of its tiles loads fewest bytes when it has twice as many row
// blocks as column tiles, since a tile of the weights is twice as large as one of the rows.
constexpr int32_t kGateUpPanelTiles = 8;
// Row blocks for a quarter of the SMs: with any multiple of four column tiles a minibatch is a
// whole number of waves, at whose ends the SMs are in step.
constexpr int32_t kMinibatchTiles = 4;
// Pushes run at an eighth of their pace beside pulls, which fill the link in the same direction.
constexpr uint64_t kPushSlowdownBesidePulls = 8;
constexpr int32_t kSeatsPerCommSm = 6;  // push warps of a block that only exchanges

Status CheckShape(const ForwardLayerShape& shape) {
  MOK_RETURN_IF_ERROR(CheckRange("max_tokens", shape.max_tokens, 0, INT32_MAX / 2));
  MOK_RETURN_IF_ERROR(CheckMultiple("hidden", shape.hidden, 8, 8));
  MOK_RETURN_IF_ERROR(CheckMultiple("intermediate", shape.intermediate, 8, 8));
  MOK_RETURN_IF_ERROR(CheckMultiple("shared_intermediate", shape.shared_intermediate, 0, 8));
  MOK_RETURN_IF_ERROR(CheckRange("topk", shape.topk, 1, 1 << 16));
  MOK_RETURN_IF_ERROR(CheckRange("ep_size", shape.ep_size, 1, kMaxExchangeRanks));
  MOK_RETURN_IF_ERROR(CheckRange("num_experts", shape.num_experts, 1, INT32_MAX));
  return CheckRange("num_local_experts", shape.num_local_experts, 0, shape.num_experts);
}

// The largest equal part of a row that fits.
uint32_t ChunkBytes(int64_t row_bytes, int64_t max_bytes) {
  const int64_t chunks = CeilDiv(row_bytes, max_bytes);
  return static_cast<uint32_t>(RoundUp(CeilDiv(row_bytes, chunks), int64_t{16}));
}

int64_t MinibatchRows(const ForwardLayerShape& shape, int32_t num_workers) {
  MinibatchModel model;
  model.intermediate = shape.intermediate;
  model.tile_rows = kRowBlock;
  model.tile_columns = kTileColumns;
  model.workers_per_tile = 1;
  model.num_workers = num_workers;
  return std::max(DefaultMinibatchRows(model),
                  CeilDiv<int64_t>(num_workers, kMinibatchTiles) * kRowBlock);
}

int64_t MacrobatchRows(const ForwardLayerShape& shape, int64_t minibatch_rows) {
  MacrobatchModel model;
  model.total_tokens = shape.max_tokens * shape.ep_size;
  model.topk = shape.topk;
  model.num_experts = shape.num_experts;
  model.num_local_experts = shape.num_local_experts;
  model.minibatch_rows = minibatch_rows;
  return DefaultMacrobatchRows(model);
}

// Row blocks of a panel whose waves have `column_tiles` columns; 0: the minibatch is no larger.
int32_t PanelBlocks(int32_t num_workers, int32_t column_tiles, int64_t minibatch_blocks) {
  const int32_t panel = CeilDiv(num_workers, column_tiles);
  return panel < minibatch_blocks ? panel : 0;
}

// InputGrad of half a minibatch before what it still has to send stands in its way.
int64_t DxWindowBlocks(const ForwardConfig& config) {
  return std::min(CeilDiv<int64_t>(3 * config.minibatch_blocks, 2), config.macrobatch_blocks);
}

bool HoldsEveryRouting(const ForwardConfig& config, const ForwardLayerShape& shape) {
  const int64_t tokens = shape.max_tokens * shape.ep_size;
  return config.ring_rows() >=
         RoutingTableCapacityRows(tokens, shape.topk, shape.num_local_experts);
}

// Where a token has one route, the shared expert's rows are half of what TokenReduce reads, and
// writing them costs as much again. With several routes their rows are most of it, and TokenReduce,
// which has nothing else to do, reads them faster; SharedDown is then better used to hide the last
// rows going out, and SharedInputGrad ends before the pass does (benchmarks/RESULTS.md).
int32_t FusedReduceWidth(const ForwardLayerShape& shape) {
  return shape.shared_intermediate > 0 && shape.topk == 1 ? kFusedReduceWidth : 0;
}

// The pace of one warp when all that push share the link.
uint64_t PushInterval(const ForwardConfig& config, const ForwardLayerShape& shape,
                      const HopperDevice& device) {
  if (shape.ep_size == 1 || device.push_gigabytes_per_second <= 0) return 0;
  const bool dedicated = config.num_comm_sms > 0;
  const double warps = dedicated ? config.num_comm_sms * kSeatsPerCommSm : config.num_blocks;
  const double bytes = dedicated ? config.dedicated_chunk_bytes : config.chunk_bytes;
  return static_cast<uint64_t>(warps * bytes / device.push_gigabytes_per_second);
}

std::string ReductionText(const ForwardConfig& config) {
  const int32_t forward = config.fused_forward_reduce, backward = config.fused_backward_reduce;
  if (forward == 0 && backward == 0) return "";
  return StrCat(", fused with ", forward, " tiles of SharedDown, ", backward,
                " of SharedInputGrad");
}

}  // namespace

int64_t ForwardConfig::ring_rows() const { return macrobatch_blocks * kRowBlock; }

int64_t ForwardConfig::d_x_rows() const {
  return std::min(d_x_window_blocks, macrobatch_blocks) * kRowBlock;
}

std::string ForwardConfig::ToString() const {
  return StrCat(order == ColumnOrder::kPermuted ? "permuted" : "natural", " columns, ", num_blocks,
                " blocks, ", num_comm_sms, " for exchange only; row blocks: minibatch ",
                minibatch_blocks, ", macrobatch ", macrobatch_blocks, ", output panel ",
                output_panel_blocks, ", gate-up panel ", gate_up_panel_blocks, ", d_x window ",
                d_x_window_blocks, one_macrobatch ? ", never a second macrobatch" : "",
                "; per block ", exchange_tiles, " exchange and ", token_reduce_tiles,
                " reduction tiles", ReductionText(*this), "; chunk ", chunk_bytes, " bytes (",
                dedicated_chunk_bytes, " dedicated), push interval ", push_interval_ns,
                " ns, beside pulls ", push_interval_beside_pulls_ns, " ns");
}

StatusOr<ForwardConfig> SelectForwardConfig(const ForwardLayerShape& shape,
                                            const HopperDevice& device,
                                            const ForwardOptions& options) {
  MOK_RETURN_IF_ERROR(CheckShape(shape));
  MOK_RETURN_IF_ERROR(CheckRange("num_sms", options.num_sms, 0, device.num_sms));
  ForwardConfig config;
  config.num_blocks = options.num_sms > 0 ? options.num_sms : device.num_sms;
  MOK_RETURN_IF_ERROR(CheckRange("num_comm_sms", options.num_comm_sms, 0, config.num_blocks - 1));
  MOK_RETURN_IF_ERROR(CheckMultiple("minibatch_rows", options.minibatch_rows, 0, kRowBlock));
  MOK_RETURN_IF_ERROR(CheckMultiple("macrobatch_rows", options.macrobatch_rows, 0, kRowBlock));
  config.num_comm_sms = options.num_comm_sms;
  const int32_t num_workers = config.num_blocks - config.num_comm_sms;

  const int64_t shared_width = shape.shared_intermediate;
  config.order = SelectColumnOrder(shape.hidden, shape.intermediate);
  if (shared_width % 32 != 0) config.order = ColumnOrder::kNatural;

  const int64_t minibatch_rows =
      options.minibatch_rows > 0 ? options.minibatch_rows : MinibatchRows(shape, num_workers);
  const int64_t macrobatch_rows =
      options.macrobatch_rows > 0 ? options.macrobatch_rows : MacrobatchRows(shape, minibatch_rows);
  config.macrobatch_blocks = macrobatch_rows / kRowBlock;
  config.minibatch_blocks = std::min(minibatch_rows / kRowBlock, config.macrobatch_blocks);
  config.output_panel_blocks = PanelBlocks(num_workers, kPanelTiles, config.minibatch_blocks);
  config.gate_up_panel_blocks =
      PanelBlocks(num_workers, kGateUpPanelTiles, config.minibatch_blocks);

  config.d_x_window_blocks = DxWindowBlocks(config);
  config.one_macrobatch = HoldsEveryRouting(config, shape);
  config.exchange_tiles = kExchangeTiles;
  config.token_reduce_tiles = kTokenReduceTiles;
  config.fused_forward_reduce = config.fused_backward_reduce = FusedReduceWidth(shape);
  config.chunk_bytes = ChunkBytes(2 * shape.hidden, kMaxChunkBytes);
  config.dedicated_chunk_bytes = ChunkBytes(2 * shape.hidden, kMaxDedicatedChunkBytes);
  config.push_interval_ns = PushInterval(config, shape, device);
  config.push_interval_beside_pulls_ns = kPushSlowdownBesidePulls * config.push_interval_ns;
  return config;
}

}  // namespace mok
