#include "mok_comm/rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "mok_comm/test_processes.h"

namespace mok {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using ::testing::HasSubstr;

const auto kOk = OkStatus();

TEST(CheckOffersTest, AgreementIsOk) {
  EXPECT_TRUE(CheckOffers({{0, 1, 64, kOk}}).ok());
  EXPECT_TRUE(CheckOffers({{0, 3, 64, kOk}, {1, 3, 64, kOk}, {2, 3, 64, kOk}}).ok());
}

TEST(CheckOffersTest, NamesTheFirstDisagreement) {
  const Status size = CheckOffers({{0, 3, 64, kOk}, {1, 3, 64, kOk}, {2, 4, 32, kOk}});
  EXPECT_EQ(size.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(size.message(), HasSubstr("rank 0 expects 3, rank 2 expects 4"));
  // Also when rank 0 is not among those that came.
  const Status bytes = CheckOffers({{1, 3, 64, kOk}, {2, 3, 128, kOk}});
  EXPECT_THAT(bytes.message(), HasSubstr("rank 1 asks for 64, rank 2 for 128"));
}

TEST(CheckOffersTest, ReportsTheFirstRankWithoutMemory) {
  const Status full = ResourceExhaustedError("rank 1 is full");
  const Status later = ResourceExhaustedError("rank 2 is full");
  EXPECT_EQ(CheckOffers({{0, 3, 64, kOk}, {1, 3, 64, full}, {2, 3, 64, later}}), full);
}

// Runs Meet and Conclude of each rank in a thread; verdict_of(rank) is what the rank concludes.
template <class OfferOf, class VerdictOf>
std::vector<Status> Gather(const std::string& name, int size, OfferOf offer_of,
                           VerdictOf verdict_of) {
  std::vector<Status> results(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const auto deadline = steady_clock::now() + seconds(60);
      StatusOr<Rendezvous> rendezvous = Rendezvous::Listen(name, rank);
      ASSERT_TRUE(rendezvous.ok()) << rendezvous.status();
      const Status met = rendezvous->Meet(offer_of(rank), FileDescriptor(), deadline);
      ASSERT_TRUE(met.ok()) << met;
      EXPECT_EQ(rendezvous->Offers().size(), static_cast<size_t>(size));
      const Status verdict = verdict_of(rank, *rendezvous);
      results[static_cast<size_t>(rank)] = rendezvous->Conclude(verdict, deadline);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

TEST(RendezvousTest, ErrorOfOneOfferReachesAll) {
  const Status full = ResourceExhaustedError("rank 2: wanted 5, available 3");
  const auto results = Gather(
      UniqueGroupName("offer"), 4,
      [&](int rank) { return RendezvousOffer{rank, 4, 64, rank == 2 ? full : OkStatus()}; },
      [](int, const Rendezvous& rendezvous) { return CheckOffers(rendezvous.Offers()); });
  for (const Status& result : results) EXPECT_EQ(result, full);
}

TEST(RendezvousTest, VerdictOfOneRankReachesAll) {
  const Status cannot_map = ResourceExhaustedError("rank 1: cannot map");
  const auto results = Gather(
      UniqueGroupName("verdict"), 3, [](int rank) { return RendezvousOffer{rank, 3, 64, kOk}; },
      [&](int rank, const Rendezvous&) { return rank == 1 ? cannot_map : OkStatus(); });
  for (const Status& result : results) EXPECT_EQ(result, cannot_map);
}

TEST(RendezvousTest, LongMessagesAreCutNotLost) {
  const std::string text(2000, 'm');
  const auto results = Gather(
      UniqueGroupName("text"), 2, [](int rank) { return RendezvousOffer{rank, 2, 64, kOk}; },
      [&](int rank, const Rendezvous&) { return rank == 0 ? InternalError(text) : OkStatus(); });
  EXPECT_EQ(results[0].message(), text);
  EXPECT_EQ(results[1].code(), StatusCode::kInternal);
  EXPECT_EQ(results[1].message(), text.substr(0, results[1].message().size()));
  EXPECT_GT(results[1].message().size(), 400u);
}

TEST(RendezvousTest, NamesAPeerThatLeavesBeforeItsVerdict) {
  const std::string name = UniqueGroupName("leave");
  const auto deadline = steady_clock::now() + seconds(60);
  std::thread leaver([&] {
    StatusOr<Rendezvous> rendezvous = Rendezvous::Listen(name, 1);
    ASSERT_TRUE(rendezvous.ok());
    EXPECT_TRUE(rendezvous->Meet({1, 2, 64, kOk}, FileDescriptor(), deadline).ok());
  });
  StatusOr<Rendezvous> rendezvous = Rendezvous::Listen(name, 0);
  ASSERT_TRUE(rendezvous.ok());
  EXPECT_TRUE(rendezvous->Meet({0, 2, 64, kOk}, FileDescriptor(), deadline).ok());
  leaver.join();
  const Status status = rendezvous->Conclude(kOk, deadline);
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("rank 1 of"));
}

TEST(RendezvousTest, ASilentPeerTimesOutWithItsName) {
  const std::string name = UniqueGroupName("silent");
  StatusOr<Rendezvous> silent = Rendezvous::Listen(name, 1);
  ASSERT_TRUE(silent.ok());
  std::thread meeting([&] {
    EXPECT_TRUE(
        silent->Meet({1, 2, 64, kOk}, FileDescriptor(), steady_clock::now() + seconds(60)).ok());
  });
  StatusOr<Rendezvous> rendezvous = Rendezvous::Listen(name, 0);
  ASSERT_TRUE(rendezvous.ok());
  EXPECT_TRUE(
      rendezvous->Meet({0, 2, 64, kOk}, FileDescriptor(), steady_clock::now() + seconds(60)).ok());
  meeting.join();
  const Status status = rendezvous->Conclude(kOk, steady_clock::now() + milliseconds(50));
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
  EXPECT_THAT(status.message(), HasSubstr("waited for rank 1"));
}

}  // namespace
}  // namespace mok
