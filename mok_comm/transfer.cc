#include "mok_comm/transfer.h"

#include <cstring>

#include "mok_core/status.h"

namespace mok {
namespace {

constexpr int kAnyRank = -1;

// Rows [first_row, first_row + num_rows) of the table come from consecutive rows of one rank.
struct Run {
  int64_t first_row;
  int64_t num_rows;
  int32_t rank;
  int64_t source_row;
};

// The longest run that starts at `row`, which is not padding.
Run RunAt(const RowTable& table, int64_t row, int routes_per_row) {
  Run run{row, 1, table.source_rank[row], table.source_route[row] / routes_per_row};
  for (int64_t next = row + 1; next < table.rows; ++next, ++run.num_rows) {
    // A padding row differs in its rank.
    if (table.source_rank[next] != run.rank) break;
    if (table.source_route[next] / routes_per_row != run.source_row + run.num_rows) break;
  }
  return run;
}

// Calls visit(run) for all rows but padding, of `rank` only unless it is kAnyRank.
template <class Visit>
void ForEachRun(const RowTable& table, int rank, int routes_per_row, Visit visit) {
  for (int64_t row = 0; row < table.rows;) {
    const int32_t source_rank = table.source_rank[row];
    if (source_rank < 0 || (rank != kAnyRank && source_rank != rank)) {
      ++row;
      continue;
    }
    const Run run = RunAt(table, row, routes_per_row);
    visit(run);
    row += run.num_rows;
  }
}

LocalRows RowsOf(const PeerBuffers& buffers, int rank) {
  return {buffers.bases[rank] + buffers.offset, buffers.row_bytes, buffers.row_bytes};
}

// One memcpy where the rows of both sides are dense, else one per row.
void CopyRows(const LocalRows& from, int64_t from_row, const LocalRows& to, int64_t to_row,
              int64_t num_rows) {
  MOK_CHECK(from.row_bytes == to.row_bytes)
      << "rows of " << from.row_bytes << " bytes, to rows of " << to.row_bytes;
  const std::byte* source = from.data + from_row * from.stride_bytes;
  std::byte* destination = to.data + to_row * to.stride_bytes;
  const auto row_bytes = static_cast<size_t>(from.row_bytes);
  if (from.stride_bytes == from.row_bytes && to.stride_bytes == to.row_bytes) {
    std::memcpy(destination, source, row_bytes * static_cast<size_t>(num_rows));
    return;
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    std::memcpy(destination, source, row_bytes);
    source += from.stride_bytes;
    destination += to.stride_bytes;
  }
}

float* ScalarsOf(const PeerBuffers& buffers, int rank) {
  return reinterpret_cast<float*>(buffers.bases[rank] + buffers.offset);
}

}  // namespace

void PullRows(const RowTable& table, int routes_per_row, const PeerBuffers& sources,
              const LocalRows& destination) {
  ForEachRun(table, kAnyRank, routes_per_row, [&](const Run& run) {
    CopyRows(RowsOf(sources, run.rank), run.source_row, destination, run.first_row, run.num_rows);
  });
}

void PushRows(const RowTable& table, const LocalRows& source, const PeerBuffers& destinations) {
  ForEachRun(table, kAnyRank, /*routes_per_row=*/1, [&](const Run& run) {
    CopyRows(source, run.first_row, RowsOf(destinations, run.rank), run.source_row, run.num_rows);
  });
}

void PushRowsToReader(const RowTable& reader_table, int rank, int routes_per_row,
                      const LocalRows& local, const LocalRows& reader_rows) {
  ForEachRun(reader_table, rank, routes_per_row, [&](const Run& run) {
    CopyRows(local, run.source_row, reader_rows, run.first_row, run.num_rows);
  });
}

void PullRowsFromReader(const RowTable& reader_table, int rank, const LocalRows& reader_rows,
                        const LocalRows& local) {
  ForEachRun(reader_table, rank, /*routes_per_row=*/1, [&](const Run& run) {
    CopyRows(reader_rows, run.first_row, local, run.source_row, run.num_rows);
  });
}

void PullScalars(const RowTable& table, const PeerBuffers& sources, float* destination) {
  for (int64_t row = 0; row < table.rows; ++row) {
    const int32_t rank = table.source_rank[row];
    if (rank >= 0) destination[row] = ScalarsOf(sources, rank)[table.source_route[row]];
  }
}

void PushScalars(const RowTable& table, const float* source, const PeerBuffers& destinations) {
  for (int64_t row = 0; row < table.rows; ++row) {
    const int32_t rank = table.source_rank[row];
    if (rank >= 0) ScalarsOf(destinations, rank)[table.source_route[row]] = source[row];
  }
}

void PushScalarsToReader(const RowTable& reader_table, int rank, const float* local,
                         float* reader_values) {
  for (int64_t row = 0; row < reader_table.rows; ++row) {
    if (reader_table.source_rank[row] != rank) continue;
    reader_values[row] = local[reader_table.source_route[row]];
  }
}

void PullScalarsFromReader(const RowTable& reader_table, int rank, const float* reader_values,
                           float* local) {
  for (int64_t row = 0; row < reader_table.rows; ++row) {
    if (reader_table.source_rank[row] != rank) continue;
    local[reader_table.source_route[row]] = reader_values[row];
  }
}

}  // namespace mok
