#include "halo_program.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <vector>

#include "stencil.h"

namespace custom_kernel {
namespace {

constexpr int64_t kTotalRows = 24;
constexpr int64_t kColumns = 10;
constexpr int64_t kSteps = 37;

float InputAt(int64_t row, int64_t column) {
  return static_cast<float>((row * 31 + column * 17) % 101) / 7.0f;
}

std::chrono::steady_clock::time_point Deadline() {
  return std::chrono::steady_clock::now() + std::chrono::seconds(30);
}

std::vector<float> SerialResult() {
  std::vector<float> grid(kTotalRows * kColumns), scratch(grid.size());
  const auto view = mok::ContiguousMatrix(grid.data(), kTotalRows, kColumns);
  for (int64_t row = 0; row < kTotalRows; ++row) {
    for (int64_t column = 0; column < kColumns; ++column) view(row, column) = InputAt(row, column);
  }
  RunSerially(view, mok::ContiguousMatrix(scratch.data(), kTotalRows, kColumns), kSteps);
  return grid;
}

struct Split {
  int ranks;
  int64_t block_rows;
  int workers;  // per rank
};

class HaloProgramTest : public testing::TestWithParam<Split> {};

// Fills the rank's input, runs its workers, and stores the first error.
void RunRank(HaloProgram& program, int64_t first_row, int workers, mok::Status& status) {
  const auto input = program.Input();
  for (int64_t row = 0; row < input.rows; ++row) {
    for (int64_t column = 0; column < kColumns; ++column) {
      input(row, column) = InputAt(first_row + row, column);
    }
  }
  status = program.Start(Deadline());
  if (!status.ok()) return;
  std::vector<mok::Status> results(static_cast<size_t>(workers));
  std::vector<std::thread> threads;
  for (auto& result : results) {
    threads.emplace_back([&program, &result] { result = program.RunWorker(Deadline()); });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& result : results) {
    if (!result.ok()) status = result;
  }
}

TEST_P(HaloProgramTest, AnySplitGivesTheBitsOfTheSerialLoop) {
  const Split split = GetParam();
  const HaloShape shape{kTotalRows / split.ranks, kColumns, split.block_rows, kSteps};
  auto heaps = mok::CreateInProcessHeaps(split.ranks, HaloLayout(shape, split.ranks).bytes);
  ASSERT_TRUE(heaps.ok()) << heaps.status();
  std::vector<std::unique_ptr<HaloProgram>> programs;
  for (const auto& heap : *heaps) programs.push_back(std::make_unique<HaloProgram>(*heap, shape));

  std::vector<mok::Status> statuses(static_cast<size_t>(split.ranks));
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < programs.size(); ++rank) {
    const int64_t first_row = static_cast<int64_t>(rank) * shape.rows_per_rank;
    threads.emplace_back([&, rank, first_row] {
      RunRank(*programs[rank], first_row, split.workers, statuses[rank]);
    });
  }
  for (auto& thread : threads) thread.join();

  const std::vector<float> expected = SerialResult();
  for (size_t rank = 0; rank < programs.size(); ++rank) {
    ASSERT_TRUE(statuses[rank].ok()) << statuses[rank];
    const auto output = programs[rank]->Output();
    for (int64_t row = 0; row < output.rows; ++row) {
      const int64_t global_row = static_cast<int64_t>(rank) * shape.rows_per_rank + row;
      for (int64_t column = 0; column < kColumns; ++column) {
        const auto index = static_cast<size_t>(global_row * kColumns + column);
        EXPECT_EQ(output(row, column), expected[index]) << global_row << ", " << column;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Splits, HaloProgramTest,
                         testing::Values(Split{1, 24, 1}, Split{1, 5, 3}, Split{2, 4, 1},
                                         Split{3, 3, 2}, Split{4, 6, 2}, Split{8, 1, 2}));

TEST(HaloProgramTest, MissingNeighbourIsAnErrorNotAHang) {
  const HaloShape shape{4, kColumns, 2, 3};
  auto heaps = mok::CreateInProcessHeaps(2, HaloLayout(shape, 2).bytes);
  ASSERT_TRUE(heaps.ok()) << heaps.status();
  HaloProgram program(*(*heaps)[0], shape);
  const auto soon = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
  EXPECT_EQ(program.Start(soon).code(), mok::StatusCode::kDeadlineExceeded);
}

}  // namespace
}  // namespace custom_kernel
