// Rendezvous of the ranks of one machine: everybody meets everybody over abstract Unix sockets,
// shows what it wants and hands over a file descriptor. Private to mok_comm.
//
// Rank r listens on the abstract address "mok.<uid>.<name>.<r>" and connects to all lower ranks;
// each pair exchanges one packet (its offer) in either direction, and a second one (its verdict) at
// the end. Abstract addresses are no files: the kernel drops them with the process.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "mok_comm/file_descriptor.h"
#include "mok_core/status.h"

namespace mok {

// What a rank shows to the others.
struct RendezvousOffer {
  int rank = 0;
  int size = 0;        // number of ranks this one expects
  uint64_t bytes = 0;  // size of its memory
  Status status;       // why it has no memory, if so
};

class Rendezvous {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  // Starts to listen as own.rank. kFailedPrecondition when another process does so already.
  static StatusOr<Rendezvous> Listen(const std::string& name, int rank);

  // Exchanges offers, and `memory` along with the own one if its status is ok, with every rank
  // below the smallest size anyone claims. kDeadlineExceeded names the ranks that did not come.
  // When it returns, nobody listens as this rank any more.
  Status Meet(const RendezvousOffer& own, const FileDescriptor& memory, Deadline deadline);

  // After Meet, whatever its result: tells this rank's verdict to all it has met and collects
  // theirs. Returns the own error, else the first peer's by rank; kUnavailable for a peer that died
  // before its verdict.
  Status Conclude(const Status& own, Deadline deadline);

  // After Meet: offers of all ranks that came, the own one included, ascending by rank.
  std::vector<RendezvousOffer> Offers() const;

  // After a successful Meet: the memory of a peer whose offer is ok.
  const FileDescriptor& Memory(int peer) const { return peers_[static_cast<size_t>(peer)].memory; }

 private:
  struct Peer {
    FileDescriptor socket;
    FileDescriptor memory;
    RendezvousOffer offer;
    bool met = false;        // offer received
    bool concluded = false;  // verdict received, or gone
  };

  Rendezvous(std::string name, int rank, FileDescriptor listener)
      : name_(std::move(name)), rank_(rank), listener_(std::move(listener)) {}

  int NumExpected() const;
  std::vector<int> MissingRanks() const;
  void ConnectToLowerRanks();
  void AcceptAll();
  void ReceiveOffers(std::chrono::milliseconds patience);
  bool SendOffer(const FileDescriptor& socket) const;
  bool ReceiveOffer(Peer& peer);
  Status ReceiveVerdict(int rank, Peer& peer);

  std::string name_;
  int rank_;
  FileDescriptor listener_;
  RendezvousOffer own_;
  int own_memory_ = -1;          // borrowed during Meet
  std::vector<Peer> peers_;      // by rank; grows when a rank beyond own_.size comes
  std::vector<Peer> strangers_;  // accepted, offer not yet seen
};

// The verdict all ranks reach on the same offers: the first rank, ascending, that disagrees with
// rank 0 on size or bytes (kInvalidArgument with both values), else the first offer's error.
Status CheckOffers(const std::vector<RendezvousOffer>& offers);

}  // namespace mok
