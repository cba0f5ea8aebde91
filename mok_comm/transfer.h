// Row transfers between ranks: the four exchanges of a MoE layer, each in both directions.
//
// Two roles. The *source rank* of a route holds its token; the *reader* holds the expert and, for
// its rows, the table (source rank, source route). A route is token * K + k on the source rank.
//
//   exchange          data moves          driven by the reader   driven by the source rank
//   dispatch          source -> reader    PullRows               PushRowsToReader
//   combine           reader -> source    PushRows               PullRowsFromReader
//   reverse combine   source -> reader    PullRows               PushRowsToReader
//   reverse dispatch  reader -> source    PushRows               PullRowsFromReader
//
// Rows are opaque bytes. On the source side a row is found by route / routes_per_row: K where the
// buffer has one row per token (x, d_out), 1 where it has one per route (combine results, dx rows,
// router weights and their gradients). Row i of the table is row i of the buffer on the reader's
// side. Padding (-1) is skipped and its rows are not touched. Nothing here checks an index: the
// table was checked when it was built. Nothing waits or signals either: that is the task program's.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mok {

// Rows of a routing table, or a part of one.
struct RowTable {
  const int32_t* source_rank = nullptr;   // [rows]; -1: padding
  const int32_t* source_route = nullptr;  // [rows]; token * K + k on the source rank; -1: padding
  int64_t rows = 0;

  RowTable Block(int64_t first_row, int64_t num_rows) const {
    return {source_rank + first_row, source_route + first_row, num_rows};
  }
};

// One buffer on every rank: rank p's starts at bases[p] + offset, its rows follow each other.
struct PeerBuffers {
  std::byte* const* bases = nullptr;  // [ranks]; SymmetricHeap::bases()
  size_t offset = 0;                  // bytes; the same on all ranks
  int64_t row_bytes = 0;
};

// The buffer on the side where the call runs. Rows may be further apart than they are long, which
// is as long as those of the PeerBuffers.
struct LocalRows {
  std::byte* data = nullptr;
  int64_t row_bytes = 0;
  int64_t stride_bytes = 0;  // >= row_bytes
};

// Dispatch, reverse combine by pull; runs on the reader.
// destination[i] = sources[table.source_rank[i]][table.source_route[i] / routes_per_row]
void PullRows(const RowTable& table, int routes_per_row, const PeerBuffers& sources,
              const LocalRows& destination);

// Combine, reverse dispatch by push; runs on the reader.
// destinations[table.source_rank[i]][table.source_route[i]] = source[i]
void PushRows(const RowTable& table, const LocalRows& source, const PeerBuffers& destinations);

// Dispatch, reverse combine by push; runs on the source rank and walks the reader's table.
// reader_rows[i] = local[table.source_route[i] / routes_per_row] where source_rank[i] == rank
void PushRowsToReader(const RowTable& reader_table, int rank, int routes_per_row,
                      const LocalRows& local, const LocalRows& reader_rows);

// Combine, reverse dispatch by pull; runs on the source rank and walks the reader's table.
// local[table.source_route[i]] = reader_rows[i] where source_rank[i] == rank
void PullRowsFromReader(const RowTable& reader_table, int rank, const LocalRows& reader_rows,
                        const LocalRows& local);

// The same for one fp32 per route (router weights; their gradients). Peer buffers have
// row_bytes == 4 and one element per route; local arrays are dense.
void PullScalars(const RowTable& table, const PeerBuffers& sources, float* destination);
void PushScalars(const RowTable& table, const float* source, const PeerBuffers& destinations);
void PushScalarsToReader(const RowTable& reader_table, int rank, const float* local,
                         float* reader_values);
void PullScalarsFromReader(const RowTable& reader_table, int rank, const float* reader_values,
                           float* local);

}  // namespace mok
