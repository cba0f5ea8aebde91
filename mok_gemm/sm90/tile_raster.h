// The order in which a grouped GEMM visits its output tiles: experts ascending; the row blocks of
// an expert in panels; inside a panel, column tiles outer and row blocks inner. Blocks that run at
// the same time then share the weights of few column tiles and the rows of one panel through L2.
#pragma once

#include <cstdint>

#include "mok_core/bits.h"
#include "mok_core/macros.h"

namespace mok {

struct TilePlace {
  int32_t expert;
  int32_t row_block;  // of the expert
  int32_t column_tile;
};

struct TileRasterShape {
  const int32_t* expert_rows;  // [num_experts], >= 0, host or device memory
  int32_t num_experts;
  int32_t column_tiles;      // of every expert
  int32_t tile_rows;         // rows of a row block
  int32_t max_panel_blocks;  // >= 1; an expert's panels are equal up to rounding
};

// Decodes ascending tile indices. A wave of 132 tiles of 128 x 256 reads least when its panel has
// about 16 row blocks (a square); kDefaultPanelBlocks lets an expert of up to 24 row blocks be one
// panel, so that its weights are read once.
class TileRaster {
 public:
  static constexpr int32_t kDefaultPanelBlocks = 24;

  explicit MOK_HOST_DEVICE TileRaster(const TileRasterShape& shape) : shape_(shape) { Enter(0); }

  // The place of tile `tile`, which is not below that of the previous call. False: there is none.
  MOK_HOST_DEVICE bool Find(int64_t tile, TilePlace& place) {
    while (expert_ < shape_.num_experts && tile >= first_tile_ + NumTiles()) {
      first_tile_ += NumTiles();
      Enter(expert_ + 1);
    }
    if (expert_ >= shape_.num_experts) return false;
    const int64_t index = tile - first_tile_;
    const int64_t panel_tiles = int64_t{panel_blocks_} * shape_.column_tiles;
    const auto panel = static_cast<int32_t>(index / panel_tiles);
    const auto in_panel = static_cast<int32_t>(index - panel * panel_tiles);
    const int32_t first_block = panel * panel_blocks_;
    const int32_t rest = row_blocks_ - first_block;
    const int32_t blocks = rest < panel_blocks_ ? rest : panel_blocks_;
    place = {expert_, first_block + in_panel % blocks, in_panel / blocks};
    return true;
  }

 private:
  MOK_HOST_DEVICE void Enter(int32_t expert) {
    expert_ = expert;
    if (expert >= shape_.num_experts) return;
    row_blocks_ = CeilDiv(shape_.expert_rows[expert], shape_.tile_rows);
    const int32_t panels = CeilDiv(row_blocks_, shape_.max_panel_blocks);
    panel_blocks_ = panels > 0 ? CeilDiv(row_blocks_, panels) : 1;
  }
  MOK_HOST_DEVICE int64_t NumTiles() const { return int64_t{row_blocks_} * shape_.column_tiles; }

  TileRasterShape shape_;
  int64_t first_tile_ = 0;  // of expert_
  int32_t expert_ = 0;
  int32_t row_blocks_ = 0, panel_blocks_ = 1;  // of expert_
};

}  // namespace mok
