#include "mok_core/emulator/vector_clock.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace mok::emulator {
namespace {

TEST(VectorClockTest, UnknownAgentsAreZero) {
  const VectorClock clock;
  EXPECT_EQ(clock[0], 0u);
  EXPECT_EQ(clock[12345], 0u);
}

TEST(VectorClockTest, CopiesAreIndependent) {
  VectorClock a;
  a.Raise(5, 3);
  VectorClock b = a;
  b.Raise(5, 7);
  b.Raise(500, 1);
  EXPECT_EQ(a[5], 3u);
  EXPECT_EQ(a[500], 0u);
  EXPECT_EQ(b[5], 7u);
  a = b;
  b.Raise(5, 9);
  EXPECT_EQ(a[5], 7u);
}

TEST(VectorClockTest, RaiseNeverLowers) {
  VectorClock clock;
  clock.Raise(1, 10);
  clock.Raise(1, 4);
  EXPECT_EQ(clock[1], 10u);
}

TEST(VectorClockTest, JoinFromAChunkOn) {
  VectorClock a, b;
  b.Raise(3, 1);
  b.Raise(VectorClock::kChunk + 3, 2);
  a.Join(b, 1);
  EXPECT_EQ(a[3], 0u);
  EXPECT_EQ(a[VectorClock::kChunk + 3], 2u);
}

// Many clocks that share and part again behave like plain maps.
TEST(VectorClockTest, AgreesWithPlainMaps) {
  constexpr int kClocks = 6, kAgents = 3 * VectorClock::kChunk;
  std::mt19937 random(1);
  std::vector<VectorClock> clocks(kClocks);
  std::vector<std::vector<uint32_t>> plain(kClocks, std::vector<uint32_t>(kAgents, 0));
  for (int step = 0; step < 4000; ++step) {
    const int a = static_cast<int>(random() % kClocks), b = static_cast<int>(random() % kClocks);
    switch (random() % 5) {
      case 0:
        clocks[a].Join(clocks[b]);
        for (int i = 0; i < kAgents; ++i) plain[a][i] = std::max(plain[a][i], plain[b][i]);
        break;
      case 1:
        clocks[a].Meet(clocks[b]);
        for (int i = 0; i < kAgents; ++i) plain[a][i] = std::min(plain[a][i], plain[b][i]);
        break;
      case 2:
        clocks[a] = clocks[b];
        plain[a] = plain[b];
        break;
      default: {
        const uint32_t agent = random() % kAgents, value = random() % 100;
        clocks[a].Raise(agent, value);
        plain[a][agent] = std::max(plain[a][agent], value);
      }
    }
    const uint32_t agent = random() % kAgents;
    ASSERT_EQ(clocks[a][agent], plain[a][agent]);
  }
  for (int c = 0; c < kClocks; ++c) {
    for (int i = 0; i < kAgents; ++i) ASSERT_EQ(clocks[c][i], plain[c][i]);
  }
}

}  // namespace
}  // namespace mok::emulator
