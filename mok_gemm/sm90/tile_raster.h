// The order in which a grouped GEMM visits its output tiles: experts ascending; the row blocks of
// an expert in panels; inside a panel, column tiles outer and row blocks inner. Blocks that run at
// the same time then share the weights of few column tiles and the rows of one panel through L2.
//
// The last wave: when at most half of the workers would get a tile, its tiles are split into two
// halves of their columns, and it takes half as long.
#pragma once

#include <cstdint>

#include "mok_core/bits.h"
#include "mok_core/macros.h"

namespace mok {

enum class TilePart : int32_t { kWhole, kFirstHalf, kSecondHalf };

struct TilePlace {
  int32_t expert;
  int32_t row_block;  // of the expert
  int32_t column_tile;
  TilePart part;  // of the tile's columns
};

struct TileRasterShape {
  const int32_t* expert_rows;  // [num_experts], >= 0, host or device memory
  int32_t num_experts;
  int32_t column_tiles;      // of every expert
  int32_t tile_rows;         // rows of a row block
  int32_t max_panel_blocks;  // >= 1; an expert's panels are equal up to rounding
  int32_t num_workers;       // that share the tiles evenly; 0: no tile is split
};

// Decodes ascending indices. A wave of 132 tiles of 128 x 256 reads least when its panel has about
// 16 row blocks (a square); kDefaultPanelBlocks lets an expert of up to 24 row blocks be one panel,
// so that its weights are read once.
class TileRaster {
 public:
  static constexpr int32_t kDefaultPanelBlocks = 24;

  explicit MOK_HOST_DEVICE TileRaster(const TileRasterShape& shape) : shape_(shape) {
    int64_t row_blocks = 0;
    for (int32_t expert = 0; expert < shape.num_experts; ++expert) {
      row_blocks += CeilDiv(shape.expert_rows[expert], shape.tile_rows);
    }
    num_whole_ = num_tiles_ = row_blocks * shape.column_tiles;
    if (shape.num_workers > 0) {
      const int64_t rest = num_tiles_ % shape.num_workers;
      if (2 * rest <= shape.num_workers) num_whole_ -= rest;
    }
    Enter(0);
  }

  // The place of index `index`, which is not below that of the previous call. False: there is none.
  MOK_HOST_DEVICE bool Find(int64_t index, TilePlace& place) {
    int64_t tile = index;
    place.part = TilePart::kWhole;
    if (index >= num_whole_) {
      const int64_t half = index - num_whole_;
      tile = num_whole_ + half / 2;
      place.part = half % 2 == 0 ? TilePart::kFirstHalf : TilePart::kSecondHalf;
    }
    if (tile >= num_tiles_) return false;
    while (tile >= first_tile_ + TilesOfExpert()) {
      first_tile_ += TilesOfExpert();
      Enter(expert_ + 1);
    }
    FindInExpert(tile - first_tile_, place);
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

  MOK_HOST_DEVICE int64_t TilesOfExpert() const {
    return int64_t{row_blocks_} * shape_.column_tiles;
  }

  MOK_HOST_DEVICE void FindInExpert(int64_t tile, TilePlace& place) const {
    const int64_t panel_tiles = int64_t{panel_blocks_} * shape_.column_tiles;
    const auto panel = static_cast<int32_t>(tile / panel_tiles);
    const auto in_panel = static_cast<int32_t>(tile - panel * panel_tiles);
    const int32_t first_block = panel * panel_blocks_;
    const int32_t rest = row_blocks_ - first_block;
    const int32_t blocks = rest < panel_blocks_ ? rest : panel_blocks_;
    place.expert = expert_;
    place.row_block = first_block + in_panel % blocks;
    place.column_tile = in_panel / blocks;
  }

  TileRasterShape shape_;
  int64_t num_tiles_, num_whole_;  // tiles from num_whole_ on are split
  int64_t first_tile_ = 0;         // of expert_
  int32_t expert_ = 0;
  int32_t row_blocks_ = 0, panel_blocks_ = 1;  // of expert_
};

}  // namespace mok
