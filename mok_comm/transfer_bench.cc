// Rates of the row transfers on one core, next to plain memcpy of the same rows in the same order.
//
//   transfer_bench [row_bytes] [rows] [repeats]      default: 14336 16384 15
//
// Two virtual ranks in one process; the reader's table names the rows of both in random order, so
// that no two rows travel as one copy. Each line is the median over the repeats, in which the
// transfers take turns; a copied byte counts once.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "mok_comm/symmetric_heap.h"
#include "mok_comm/transfer.h"
#include "mok_core/status.h"

namespace mok {
namespace {

constexpr int kRanks = 2;

struct Route {
  int32_t rank;
  int32_t row;
};

// All rows of both ranks, in random order.
std::vector<Route> RandomRoutes(int64_t rows) {
  std::vector<Route> routes(static_cast<size_t>(rows));
  for (size_t i = 0; i < routes.size(); ++i) {
    routes[i] = {static_cast<int32_t>(i % kRanks), static_cast<int32_t>(i / kRanks)};
  }
  std::shuffle(routes.begin(), routes.end(), std::mt19937(1));
  return routes;
}

struct Measured {
  const char* name;
  std::function<void()> run;
  std::vector<double> seconds;
};

void Measure(std::vector<Measured>& all, int repeats, double bytes) {
  for (int repeat = 0; repeat <= repeats; ++repeat) {
    for (Measured& one : all) {
      const auto begin = std::chrono::steady_clock::now();
      one.run();
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
      if (repeat > 0) one.seconds.push_back(elapsed.count());  // the first touches the pages
    }
  }
  for (Measured& one : all) {
    std::sort(one.seconds.begin(), one.seconds.end());
    const double median = one.seconds[one.seconds.size() / 2];
    std::printf("%-34s %6.2f GB/s\n", one.name, bytes / median * 1e-9);
  }
}

void Run(int64_t row_bytes, int64_t rows, int repeats) {
  const std::vector<Route> routes = RandomRoutes(rows);
  std::vector<int32_t> ranks, source_routes;
  for (const Route& route : routes) {
    ranks.push_back(route.rank);
    source_routes.push_back(route.row);
  }
  const RowTable table{ranks.data(), source_routes.data(), rows};
  const auto bytes = static_cast<size_t>(row_bytes * rows);
  const auto heaps = CreateInProcessHeaps(kRanks, bytes);
  MOK_CHECK(heaps.ok()) << heaps.status().message();
  const PeerBuffers peers{(*heaps)[0]->bases(), 0, row_bytes};
  std::vector<std::byte> buffer(bytes, std::byte{1});
  const LocalRows reader{buffer.data(), row_bytes, row_bytes};

  const auto peer_row = [&](const Route& route) {
    return peers.bases[route.rank] + route.row * row_bytes;
  };
  const auto each_rank = [&](auto transfer) {
    for (int rank = 0; rank < kRanks; ++rank) {
      transfer(rank, LocalRows{peers.bases[rank], row_bytes, row_bytes});
    }
  };
  const auto copy_row = [&](void* to, const void* from) {
    std::memcpy(to, from, static_cast<size_t>(row_bytes));
  };
  std::vector<Measured> all = {
      {"memcpy to consecutive rows",
       [&] {
         std::byte* to = reader.data;
         for (const Route& route : routes)
           copy_row(std::exchange(to, to + row_bytes), peer_row(route));
       },
       {}},
      {"PullRows", [&] { PullRows(table, 1, peers, reader); }, {}},
      {"PushRowsToReader, both ranks",
       [&] {
         each_rank([&](int rank, const LocalRows& local) {
           PushRowsToReader(table, rank, 1, local, reader);
         });
       },
       {}},
      {"memcpy from consecutive rows",
       [&] {
         const std::byte* from = reader.data;
         for (const Route& route : routes)
           copy_row(peer_row(route), std::exchange(from, from + row_bytes));
       },
       {}},
      {"PushRows", [&] { PushRows(table, reader, peers); }, {}},
      {"PullRowsFromReader, both ranks",
       [&] {
         each_rank([&](int rank, const LocalRows& local) {
           PullRowsFromReader(table, rank, reader, local);
         });
       },
       {}},
  };
  Measure(all, repeats, static_cast<double>(bytes));
}

}  // namespace
}  // namespace mok

int main(int argc, char** argv) {
  const auto argument = [&](int index, int64_t otherwise) {
    return argc > index ? std::atoll(argv[index]) : otherwise;
  };
  const int64_t row_bytes = argument(1, 14336), rows = argument(2, 16384),
                repeats = argument(3, 15);
  if (row_bytes < 1 || rows < 2 || rows % 2 != 0 || repeats < 1) {
    std::fprintf(stderr, "transfer_bench [row_bytes >= 1] [rows, even] [repeats >= 1]\n");
    return 1;
  }
  mok::Run(row_bytes, rows, static_cast<int>(repeats));
}
