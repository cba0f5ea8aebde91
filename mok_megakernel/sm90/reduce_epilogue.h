// The epilogue of the shared expert's last tiles where they do TokenReduce's work
// (ProgramShape::fused_reduce_width): adds the rows of the tokens' routes to the products and
// writes the output. The bits are those of a tile that is stored, then summed by ReduceTokens.
//
// A thread has many 16-byte loads of rows in flight, since nothing else of the block hides their
// latency. To have registers for them it rounds all its products first, which frees half of the
// accumulators' registers.
#pragma once

#include "mok_core/device/device.h"
#include "mok_gemm/sm90/epilogue.h"
#include "mok_megakernel/sm90/token_reduce.h"

namespace mok {

namespace pass_internal {

inline constexpr int kQuad = 4;          // lanes that share a row of a fragment
inline constexpr int kRowsOfThread = 2;  // 8 rows apart
inline constexpr int kGroupColumns = 32;

// The products of a thread, rounded: 8 adjacent columns of each group of 32, those of its first row
// before those of its second.
template <class Gemm>
struct RoundedTile {
  static constexpr int kGroups = Gemm::kTileN / kGroupColumns;
  static constexpr int kVectors = kRowsOfThread * kGroups;
  Word4 vectors[kVectors];

  // kOrder: of the columns that were multiplied.
  template <ColumnOrder kOrder>
  MOK_DEVICE void Round(const float (&accumulator)[Gemm::kAccumulators]) {
    MOK_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      uint32_t words[4];
      gemm_internal::PackColumns(accumulator, 16 * (i % kGroups), i / kGroups, words);
      if constexpr (kOrder == ColumnOrder::kPermuted) {
        vectors[i] = {words[0], words[1], words[2], words[3]};
      } else {
        vectors[i] = gemm_internal::QuadTranspose(words);
      }
    }
  }

  // Moves the vectors down: a loop whose body works on the first ones reaches all of them.
  template <int kStep>
  MOK_DEVICE void Next() {
    MOK_UNROLL
    for (int i = 0; i + kStep < kVectors; ++i) vectors[i] = vectors[i + kStep];
  }
};

// A thread's part of one of its rows in a tile, from a group on.
struct RowPart {
  int64_t token;
  int32_t column;                                       // the thread's first one, in the whole row
  int32_t columns;                                      // valid ones from there on; may be below 0
  bool is_token;                                        // not beyond the tile's rows
  static constexpr int kNextGroup = kGroupColumns / 8;  // words from one group to the next

  MOK_DEVICE RowPart(const ReduceTile& tile, int half, int first_group) {
    const gemm_internal::StorePlace place(ThreadIndexReadHere());
    const int row = place.row + 8 * half, first = place.column + kGroupColumns * first_group;
    is_token = row < tile.rows;
    token = tile.token + row;
    column = tile.column + first;
    columns = is_token ? tile.columns - first : 0;
  }
  MOK_DEVICE bool HasGroup(int group) const { return kGroupColumns * group < columns; }
  // The thread's words of kCount groups, as far as they are valid; else zeros, without which ptxas
  // would keep registers for them from one tile to the next.
  template <int kCount>
  MOK_DEVICE void LoadIf(bool condition, const Word4* row, Word4 (&words)[kCount]) const {
    MOK_UNROLL
    for (int group = 0; group < kCount; ++group) {
      words[group] = {0, 0, 0, 0};
      if (condition && HasGroup(group))
        words[group] = LoadVectorStreaming(row + group * kNextGroup);
    }
  }
  // Where the thread's words begin in a row of a route and of the output.
  MOK_DEVICE const Word4* WordsOfRoute(const TokenReduction& from, int32_t k) const {
    const int64_t route = token * from.topk + k;
    return reinterpret_cast<const Word4*>(from.routes + route * from.hidden + column);
  }
  MOK_DEVICE Word4* OutWords(const TokenReduction& from) const {
    return reinterpret_cast<Word4*>(from.out + token * from.hidden + column);
  }
  MOK_DEVICE float Scale(const TokenReduction& from) const {
    return is_token && from.has_shared_scale ? from.shared_scale[token] : 1.0f;
  }
};

// The routes first .. first + 3 of a row: lane q of the row's quad knows number q. Holds what it
// has loaded, and nothing made of it, so that no thread waits for the loads before they are needed.
struct QuadRoutes {
  float weight;
  int32_t sign;  // as of the expert id: -1 without a route

  MOK_DEVICE QuadRoutes(const TokenReduction& from, const RowPart& row, int32_t first) {
    const int32_t k = first + static_cast<int32_t>(ThreadIndexReadHere() % kQuad);
    const int64_t route = row.token * from.topk + k;
    const bool is_there = row.is_token && k < from.topk;
    weight = is_there && from.is_weighted ? from.route_weight[route] : 1.0f;
    sign = is_there ? from.SignOfRoute(route) : -1;
  }
  // Bit i: route first + i exists. The same in the whole quad.
  MOK_DEVICE uint32_t Valid() const {
    const uint32_t lane = ThreadIndexReadHere() % kLanes;
    return Ballot(sign >= 0) >> (lane - lane % kQuad) & ((1u << kQuad) - 1);
  }
  // Of route first + i.
  MOK_DEVICE float Weight(int i) const {
    const auto lane = static_cast<int32_t>(ThreadIndexReadHere() % kLanes);
    return Shuffle(weight, lane - lane % kQuad + i);
  }
};

}  // namespace pass_internal

// What a thread knows of its rows of a tile before their routes have landed. To be loaded before
// the tile is multiplied, which hides the latency.
struct TileRoutes {
  float scale[pass_internal::kRowsOfThread];  // of the shared term
  pass_internal::QuadRoutes first[pass_internal::kRowsOfThread];

  MOK_DEVICE TileRoutes(const TokenReduction& from, const ReduceTile& tile)
      : TileRoutes(from, {tile, 0, 0}, {tile, 1, 0}) {}

 private:
  MOK_DEVICE TileRoutes(const TokenReduction& from, const pass_internal::RowPart& upper,
                        const pass_internal::RowPart& lower)
      : scale{upper.Scale(from), lower.Scale(from)}, first{{from, upper, 0}, {from, lower, 0}} {}
};

namespace pass_internal {

// Tokens of one route: all words of the thread are loaded at once.
template <class Gemm>
MOK_DEVICE void AddOneRoute(const TokenReduction& from, const ReduceTile& tile,
                            const TileRoutes& routes, const RoundedTile<Gemm>& shared) {
  constexpr int kGroups = RoundedTile<Gemm>::kGroups;
  const RowPart rows[kRowsOfThread] = {{tile, 0, 0}, {tile, 1, 0}};
  Word4 words[kRowsOfThread][kGroups];
  bool has_route[kRowsOfThread];
  MOK_UNROLL
  for (int half = 0; half < kRowsOfThread; ++half) {
    has_route[half] = (routes.first[half].Valid() & 1u) != 0;
    rows[half].LoadIf(has_route[half], rows[half].WordsOfRoute(from, 0), words[half]);
  }
  MOK_UNROLL
  for (int half = 0; half < kRowsOfThread; ++half) {
    const float weight = routes.first[half].Weight(0);
    Word4* out = rows[half].OutWords(from);
    MOK_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      ReduceColumns sum = {};
      sum.Add(routes.scale[half], shared.vectors[half * kGroups + group]);
      if (has_route[half]) sum.Add(weight, words[half][group]);
      if (!rows[half].HasGroup(group)) continue;
      StoreVector(out + group * RowPart::kNextGroup, sum.Round());
    }
  }
}

// sum[v] += the four routes' words v, in ascending order.
template <bool kDescending, int kPart>
MOK_DEVICE void AddFour(const QuadRoutes& four, uint32_t valid, const Word4 (&words)[kQuad][kPart],
                        ReduceColumns (&sum)[kPart]) {
  MOK_UNROLL
  for (int step = 0; step < kQuad; ++step) {
    const int i = kDescending ? kQuad - 1 - step : step;
    const float weight = four.Weight(i);
    if ((valid >> i & 1u) == 0) continue;
    MOK_UNROLL
    for (int v = 0; v < kPart; ++v) sum[v].Add(weight, words[i][v]);
  }
}

// Tokens of several routes: part by part of the thread's words, each with four routes at once.
template <class Config>
MOK_DEVICE void AddRoutes(const TokenReduction& from, const ReduceTile& tile,
                          const TileRoutes& routes, RoundedTile<typename Config::Gemm>& shared) {
  constexpr int kGroups = RoundedTile<typename Config::Gemm>::kGroups;
  constexpr int kPart = kGroups < 4 ? kGroups : 4, kPartsOfRow = kGroups / kPart;
  MOK_NO_UNROLL
  for (int part = 0; part < kRowsOfThread * kPartsOfRow; ++part) {
    const bool is_upper = part < kPartsOfRow;
    const RowPart row(tile, is_upper ? 0 : 1, part % kPartsOfRow * kPart);
    const Word4* row_words = row.WordsOfRoute(from, 0);
    ReduceColumns sum[kPart] = {};
    MOK_UNROLL
    for (int v = 0; v < kPart; ++v) {
      sum[v].Add(is_upper ? routes.scale[0] : routes.scale[1], shared.vectors[v]);
    }
    QuadRoutes four = is_upper ? routes.first[0] : routes.first[1];
    MOK_NO_UNROLL
    for (int32_t k = 0; k < from.topk; k += kQuad) {
      const uint32_t valid = four.Valid();
      Word4 words[kQuad][kPart];
      MOK_UNROLL
      for (int i = 0; i < kQuad; ++i) {
        row.LoadIf((valid >> i & 1u) != 0, row_words, words[i]);
        row_words += from.hidden / 8;
      }
      // While they come: what is known of the next four.
      const QuadRoutes next(from, row, k + kQuad);
      AddFour<Config::kBug == PassBug::kRoutesDescending>(four, valid, words, sum);
      four = next;
    }
    Word4* out = row.OutWords(from);
    MOK_UNROLL
    for (int v = 0; v < kPart; ++v) {
      if (row.HasGroup(v)) StoreVector(out + v * RowPart::kNextGroup, sum[v].Round());
    }
    shared.template Next<kPart>();
  }
}

}  // namespace pass_internal

// out = bf16(scale * shared + sum over k of weight * row) for the tile: in fp32, with the products
// rounded to bf16 as the shared term, k ascending, products fused. All threads of a consumer
// warpgroup, which has acquired the rows. `tile` may reach beyond the tile to the right. kOrder: of
// the columns that were multiplied. `from.shared` is not read.
template <class Config, ColumnOrder kOrder>
MOK_DEVICE void EpilogueReduce(const TokenReduction& from, const ReduceTile& tile,
                               const TileRoutes& routes,
                               const float (&accumulator)[Config::Gemm::kAccumulators]) {
  using Gemm = typename Config::Gemm;
  pass_internal::RoundedTile<Gemm> shared;
  shared.template Round<kOrder>(accumulator);
  if (from.topk == 1) {
    pass_internal::AddOneRoute<Gemm>(from, tile, routes, shared);
  } else {
    pass_internal::AddRoutes<Config>(from, tile, routes, shared);
  }
}

}  // namespace mok
