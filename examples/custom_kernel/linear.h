// A linear layer over ranks as one persistent kernel per rank. Tokens X are split over the ranks by
// rows, the weights W by output columns:
//
//   Y of a rank [tokens, num_ranks * width] = X of that rank [tokens, k] times every rank's
//   W [width, k], transposed, side by side
//
// Each rank pulls the rows of all ranks, multiplies them with its own columns and pushes every row
// of the product to the rank that the row came from. No step waits for all of the one before:
// counters let tiles be multiplied as soon as their rows are there, and sent as soon as they are
// stored. bf16, sums in fp32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mok_comm/sm90/exchange_params.h"
#include "mok_core/bits.h"
#include "mok_core/device/ticket_counter.h"
#include "mok_core/device/types.h"
#include "mok_core/device/wait_record.h"
#include "mok_gemm/sm90/gemm_config.h"

namespace custom_kernel {

// Tiles of 128 rows by 256 columns.
using LinearGemm = mok::DefaultSm90GemmConfig<mok::ColumnOrder::kNatural>;

// What the wait record names; its task is a rank of a meeting, else a tile.
enum class LinearRole : int32_t { kEntry, kPull, kScheduler, kProducer, kConsumer, kPush, kExit };

struct LinearParams {
  struct Shape {
    int32_t rows;      // of all ranks together, in the order of pull.sources
    int32_t width;     // of this rank's W, a multiple of 8
    int32_t k_blocks;  // ceil(k / kTileK)
  } shape;
  mok::TensorMap x;       // of pull.local, [rows, k]
  mok::TensorMap w;       // [1, width, k]
  mok::RowExchange pull;  // peers' X, [tokens, k] -> local, [rows, k]
  mok::RowExchange push;  // local, [rows, width] -> peers' Y, [tokens * num_ranks, width]
  mok::RankMeeting meeting;
  uint64_t* counters;  // [CounterCount()], zero at first; they only grow. Of no use after an abort
  uint64_t pass;       // 1, 2, ...: one more for each launch, the same on all ranks
  mok::TicketCounter* ticket;
  mok::DeviceWaitParams wait;
  mok::DeviceWaitParams meeting_wait;  // less patient, so that the record names the missing rank

  // Rows are multiplied in blocks of a tile's height, and exchanged in quarters of those.
  static constexpr int32_t kBlockRows = LinearGemm::kTileM;
  static constexpr int32_t kExchangeRows = kBlockRows / 4;
  MOK_HOST_DEVICE int32_t RowBlocks() const { return mok::CeilDiv(shape.rows, kBlockRows); }
  MOK_HOST_DEVICE int32_t ColumnTiles() const {
    return mok::CeilDiv(shape.width, int32_t{LinearGemm::kTileN});
  }
  MOK_HOST_DEVICE int32_t ExchangeTiles() const { return mok::CeilDiv(shape.rows, kExchangeRows); }

  // Indices of counters: the entry has been passed; exchange tiles sent; exchange tiles that have
  // come into a row block; warps that have stored their part of one of its tiles.
  static constexpr int32_t kEntered = 0, kSent = 1;
  static constexpr int32_t Arrived(int32_t row_block) { return 2 + 2 * row_block; }
  static constexpr int32_t Stored(int32_t row_block) { return 3 + 2 * row_block; }
  int32_t CounterCount() const { return 2 + 2 * RowBlocks(); }
};

// What a launch needs.
inline constexpr uint32_t kLinearThreads = LinearGemm::kConsumerThreads + 128;
size_t LinearSharedBytes();
const void* LinearKernel();

// Mistakes that the test plants in the emulated kernel, which has to notice each.
enum class LinearBug {
  kNone,
  kNoProxyFence,    // tensor loads of rows that bulk copies of other blocks wrote
  kStoredTooEarly,  // one lane signals before the others have stored
};
const void* BuggyLinearKernel(LinearBug bug);

}  // namespace custom_kernel
