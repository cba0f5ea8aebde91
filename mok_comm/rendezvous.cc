#include "mok_comm/rendezvous.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <optional>
#include <utility>

namespace mok {
namespace {

using std::chrono::milliseconds;

constexpr int kMaxRanks = 4096;  // bounds what a confused process can make us remember

// A packet on the wire; both ends are the same machine, and the magic the same layout.
struct Packet {
  static constexpr uint64_t kMagic = 0x4d4f4b2d52445631;  // "MOK-RDV1"

  uint64_t magic = kMagic;
  uint64_t bytes = 0;
  int32_t rank = 0;
  int32_t size = 0;
  int32_t code = 0;  // StatusCode
  char message[484] = {};
};
static_assert(sizeof(Packet) == 512);

Packet MakePacket(const RendezvousOffer& offer) {
  Packet packet;
  packet.bytes = offer.bytes;
  packet.rank = offer.rank;
  packet.size = offer.size;
  packet.code = static_cast<int32_t>(offer.status.code());
  const size_t length = std::min(offer.status.message().size(), sizeof(packet.message) - 1);
  std::memcpy(packet.message, offer.status.message().data(), length);
  return packet;
}

Status StatusOf(const Packet& packet) {
  const size_t length = strnlen(packet.message, sizeof(packet.message));
  return Status(static_cast<StatusCode>(packet.code), std::string(packet.message, length));
}

struct Address {
  sockaddr_un socket_address = {};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&socket_address); }
};

// The user id keeps groups of different users apart.
Address AddressOf(const std::string& name, int rank) {
  const std::string text = StrCat("mok.", geteuid(), ".", name, ".", rank);
  Address address;
  address.socket_address.sun_family = AF_UNIX;
  // sun_path[0] stays 0: an abstract address.
  MOK_CHECK(text.size() < sizeof(address.socket_address.sun_path)) << text;
  std::memcpy(address.socket_address.sun_path + 1, text.data(), text.size());
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  return address;
}

FileDescriptor NewSocket() {
  // SEQPACKET: connected, and a packet arrives whole or not at all.
  return FileDescriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

// Abstract addresses have no permissions: look who is at the other end.
bool IsSameUser(const FileDescriptor& socket) {
  ucred credentials = {};
  socklen_t length = sizeof(credentials);
  return getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 &&
         credentials.uid == geteuid();
}

// Room for one descriptor in a control message.
union ControlBuffer {
  char bytes[CMSG_SPACE(sizeof(int))];
  cmsghdr alignment;
};

// Sends a packet and, unless it is -1, a descriptor. The queue of a fresh socket holds many, so
// this does not block; false when the peer is gone.
bool SendPacket(const FileDescriptor& socket, Packet packet, int descriptor) {
  iovec data = {&packet, sizeof(packet)};
  ControlBuffer control = {};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (descriptor >= 0) {
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof(control.bytes);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  }
  ssize_t sent;
  do {
    sent = sendmsg(socket.get(), &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(sizeof(packet));
}

enum class Received { kPacket, kNothingYet, kGone };

// Receives one packet and the descriptor that came with it.
Received ReceivePacket(const FileDescriptor& socket, Packet& packet, FileDescriptor& descriptor) {
  iovec data = {&packet, sizeof(packet)};
  ControlBuffer control = {};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof(control.bytes);
  ssize_t received;
  do {
    received = recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);
  if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Received::kNothingYet;
  if (received <= 0) return Received::kGone;
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
    int raw = -1;
    std::memcpy(&raw, CMSG_DATA(header), sizeof(int));
    descriptor = FileDescriptor(raw);
  }
  const bool valid =
      received == static_cast<ssize_t>(sizeof(packet)) && packet.magic == Packet::kMagic;
  return valid ? Received::kPacket : Received::kGone;
}

// At most until the deadline, at least 0.
milliseconds Remaining(Rendezvous::Deadline deadline) {
  const auto left = deadline - std::chrono::steady_clock::now();
  return std::max(std::chrono::ceil<milliseconds>(left), milliseconds(0));
}

void PollFor(std::vector<pollfd>& sockets, milliseconds patience) {
  // Interrupted or failed: the caller looks at all sockets and the clock anyway.
  poll(sockets.data(), sockets.size(), static_cast<int>(patience.count()));
}

std::string RankList(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += StrCat(text.empty() ? "" : ", ", rank);
  return text;
}

}  // namespace

StatusOr<Rendezvous> Rendezvous::Listen(const std::string& name, int rank) {
  const Address address = AddressOf(name, rank);
  FileDescriptor listener = NewSocket();
  if (!listener.valid()) {
    return UnavailableError("rank ", rank, ": no Unix socket: ", std::strerror(errno));
  }
  if (bind(listener.get(), address.get(), address.length) != 0) {
    if (errno == EADDRINUSE) {
      return FailedPreconditionError("another live process is rank ", rank, " of \"", name,
                                     "\"; every group of ranks needs a name of its own");
    }
    return UnavailableError("rank ", rank, ": cannot bind its socket: ", std::strerror(errno));
  }
  if (listen(listener.get(), SOMAXCONN) != 0) {
    return UnavailableError("rank ", rank, ": cannot listen: ", std::strerror(errno));
  }
  return Rendezvous(name, rank, std::move(listener));
}

// A rank that claims a smaller size does not wait for the ranks beyond it, so they may never come.
int Rendezvous::NumExpected() const {
  int smallest = own_.size;
  for (const Peer& peer : peers_) {
    if (peer.met) smallest = std::min(smallest, peer.offer.size);
  }
  return smallest;
}

std::vector<int> Rendezvous::MissingRanks() const {
  std::vector<int> missing;
  for (int rank = 0; rank < NumExpected(); ++rank) {
    if (rank != rank_ && !peers_[static_cast<size_t>(rank)].met) missing.push_back(rank);
  }
  return missing;
}

bool Rendezvous::SendOffer(const FileDescriptor& socket) const {
  return SendPacket(socket, MakePacket(own_), own_.status.ok() ? own_memory_ : -1);
}

void Rendezvous::ConnectToLowerRanks() {
  for (int rank = 0; rank < std::min(rank_, own_.size); ++rank) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    if (peer.socket.valid()) continue;
    const Address address = AddressOf(name_, rank);
    FileDescriptor socket = NewSocket();
    // Refused: not there yet. A later round tries again.
    if (connect(socket.get(), address.get(), address.length) != 0) continue;
    if (!IsSameUser(socket) || !SendOffer(socket)) continue;
    peer.socket = std::move(socket);
  }
}

void Rendezvous::AcceptAll() {
  while (true) {
    FileDescriptor socket(accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket.valid()) return;
    if (!IsSameUser(socket) || !SendOffer(socket)) continue;
    Peer stranger;
    stranger.socket = std::move(socket);
    strangers_.push_back(std::move(stranger));
  }
}

// Takes the offer if it is there. Returns whether this socket has nothing more to say here: the
// peer has met us, or it is gone, or it is none of ours.
bool Rendezvous::ReceiveOffer(Peer& peer) {
  Packet packet;
  const Received received = ReceivePacket(peer.socket, packet, peer.memory);
  if (received == Received::kNothingYet) return false;
  const bool valid = packet.rank >= 0 && packet.rank < kMaxRanks && packet.rank != rank_;
  if (received == Received::kPacket && valid) {
    peer.offer = {packet.rank, packet.size, packet.bytes, StatusOf(packet)};
    peer.met = true;
    const auto rank = static_cast<size_t>(packet.rank);
    if (rank >= peers_.size()) peers_.resize(rank + 1);
    if (!peers_[rank].met) peers_[rank] = std::move(peer);
  }
  return true;
}

void Rendezvous::ReceiveOffers(milliseconds patience) {
  std::vector<pollfd> sockets = {{listener_.get(), POLLIN, 0}};
  for (const Peer& peer : peers_) {
    if (peer.socket.valid() && !peer.met) sockets.push_back({peer.socket.get(), POLLIN, 0});
  }
  for (const Peer& peer : strangers_) sockets.push_back({peer.socket.get(), POLLIN, 0});
  PollFor(sockets, patience);

  std::vector<Peer> strangers = std::exchange(strangers_, {});
  for (Peer& stranger : strangers) {
    if (!ReceiveOffer(stranger)) strangers_.push_back(std::move(stranger));
  }
  for (int rank = 0; rank < std::min(rank_, own_.size); ++rank) {
    Peer peer = std::exchange(peers_[static_cast<size_t>(rank)], Peer());
    // Gone before it made its offer: a new process may come in its place, connect again later.
    const bool done = peer.socket.valid() && !peer.met && ReceiveOffer(peer);
    if (!done) peers_[static_cast<size_t>(rank)] = std::move(peer);
  }
}

Status Rendezvous::Meet(const RendezvousOffer& own, const FileDescriptor& memory,
                        Deadline deadline) {
  own_ = own;
  own_memory_ = memory.get();
  peers_.resize(static_cast<size_t>(own.size));
  Status status;
  while (!MissingRanks().empty()) {
    // The last look at the sockets comes after the last look at the clock.
    const milliseconds remaining = Remaining(deadline);
    ConnectToLowerRanks();
    AcceptAll();
    // Whoever waits for a lower rank has to knock again and again; the others are knocked at.
    const bool knocking = std::any_of(peers_.begin(), peers_.begin() + std::min(rank_, own_.size),
                                      [](const Peer& peer) { return !peer.socket.valid(); });
    ReceiveOffers(std::min(remaining, milliseconds(knocking ? 2 : 100)));
    if (remaining > milliseconds(0) || MissingRanks().empty()) continue;
    status = DeadlineExceededError("rank ", rank_, " timed out while it waited for the ranks of \"",
                                   name_, "\": expected ", own_.size, " ranks, missing rank ",
                                   RankList(MissingRanks()));
    break;
  }
  strangers_.clear();
  listener_.Close();
  own_memory_ = -1;
  return status;
}

std::vector<RendezvousOffer> Rendezvous::Offers() const {
  std::vector<RendezvousOffer> offers;
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    if (static_cast<int>(rank) == rank_) {
      offers.push_back(own_);
    } else if (peers_[rank].met) {
      offers.push_back(peers_[rank].offer);
    }
  }
  return offers;
}

Status Rendezvous::ReceiveVerdict(int rank, Peer& peer) {
  Packet packet;
  FileDescriptor unused;
  const Received received = ReceivePacket(peer.socket, packet, unused);
  if (received == Received::kNothingYet) return OkStatus();
  peer.concluded = true;
  if (received == Received::kPacket) return StatusOf(packet);
  return UnavailableError("rank ", rank, " of \"", name_,
                          "\" died while the ranks set up their shared memory");
}

Status Rendezvous::Conclude(const Status& own, Deadline deadline) {
  for (Peer& peer : peers_) {
    if (!peer.met) {
      peer.concluded = true;
      continue;
    }
    // One that is gone shows as such below.
    SendPacket(peer.socket, MakePacket({rank_, own_.size, own_.bytes, own}), -1);
  }
  std::vector<Status> verdicts(peers_.size());
  while (true) {
    const milliseconds remaining = Remaining(deadline);
    std::vector<pollfd> sockets;
    std::vector<int> silent;
    for (size_t rank = 0; rank < peers_.size(); ++rank) {
      if (peers_[rank].concluded) continue;
      sockets.push_back({peers_[rank].socket.get(), POLLIN, 0});
      silent.push_back(static_cast<int>(rank));
    }
    if (silent.empty()) break;
    PollFor(sockets, std::min(remaining, milliseconds(100)));
    for (const int rank : silent) {
      const auto index = static_cast<size_t>(rank);
      verdicts[index] = ReceiveVerdict(rank, peers_[index]);
    }
    if (remaining > milliseconds(0)) continue;
    for (const int rank : silent) {
      if (peers_[static_cast<size_t>(rank)].concluded) continue;
      verdicts[static_cast<size_t>(rank)] =
          DeadlineExceededError("rank ", rank_, " timed out while it waited for rank ", rank,
                                " of \"", name_, "\" to map the shared memory");
    }
    break;
  }
  MOK_RETURN_IF_ERROR(own);
  for (const Status& verdict : verdicts) MOK_RETURN_IF_ERROR(verdict);
  return OkStatus();
}

Status CheckOffers(const std::vector<RendezvousOffer>& offers) {
  for (const RendezvousOffer& offer : offers) {
    const RendezvousOffer& first = offers.front();
    if (offer.size != first.size) {
      return InvalidArgumentError("ranks disagree on the number of ranks: rank ", first.rank,
                                  " expects ", first.size, ", rank ", offer.rank, " expects ",
                                  offer.size);
    }
    if (offer.bytes != first.bytes) {
      return InvalidArgumentError("ranks disagree on the bytes of shared memory per rank: rank ",
                                  first.rank, " asks for ", first.bytes, ", rank ", offer.rank,
                                  " for ", offer.bytes);
    }
  }
  for (const RendezvousOffer& offer : offers) MOK_RETURN_IF_ERROR(offer.status);
  return OkStatus();
}

}  // namespace mok
