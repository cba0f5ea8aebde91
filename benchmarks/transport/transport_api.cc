#include "benchmarks/transport/transport_api.h"

#include <algorithm>
#include <memory>

#include "benchmarks/kernel_wait.h"
#include "benchmarks/transport/transport_launch.h"
#include "mok_core/device/runtime.h"
#include "mok_core/status.h"

struct MokTransport {
  int device = 0;
  mok::KernelWait wait;
};

namespace mok {
namespace {

StatusOr<std::unique_ptr<MokTransport>> Create(int device) {
  auto transport = std::make_unique<MokTransport>();
  transport->device = device;
  MOK_ASSIGN_OR_RETURN(const int devices, runtime::DeviceCount());
  if (device < 0 || device >= devices || devices > kMaxTransportRanks) {
    return InvalidArgumentError("device = ", device, " of ", devices, ", expected one of at most ",
                                kMaxTransportRanks);
  }
  for (int peer = 0; peer < devices; ++peer) {
    if (peer != device) MOK_RETURN_IF_ERROR(runtime::EnablePeerAccess(device, peer));
  }
  MOK_RETURN_IF_ERROR(transport->wait.Allocate(device, device));
  return transport;
}

TransportParams ParamsOf(const MokTransport& transport, const MokTransportArgs& args) {
  TransportParams params{};
  params.rank = static_cast<const int32_t*>(args.rank);
  params.row = static_cast<const int32_t*>(args.row);
  params.local = static_cast<std::byte*>(args.local);
  params.row_bytes = args.row_bytes;
  params.num_rows = args.num_rows;
  params.rows_per_tile = args.rows_per_tile;
  params.warps = args.warps;
  params.counters = static_cast<uint64_t*>(args.counters);
  for (int rank = 0; rank < kMaxTransportRanks; ++rank) {
    params.of_rank[rank] = static_cast<std::byte*>(args.of_rank[rank]);
    params.counters_of_rank[rank] = static_cast<uint64_t*>(args.counters_of_rank[rank]);
  }
  params.wait = transport.wait.params();
  return params;
}

template <class Enum>
bool IsValue(int32_t value) {
  return value >= 0 && value < static_cast<int32_t>(Enum::kCount);
}

Status Launch(const MokTransport& transport, const MokTransportArgs& args, void* stream) {
  if (!IsValue<Mechanism>(args.mechanism) || !IsValue<Side>(args.side) ||
      !IsValue<Arrival>(args.arrival)) {
    return InvalidArgumentError("mechanism = ", args.mechanism, ", side = ", args.side,
                                ", arrival = ", args.arrival, ": no such variant");
  }
  TransportLaunch launch;
  launch.mechanism = static_cast<Mechanism>(args.mechanism);
  launch.side = static_cast<Side>(args.side);
  launch.arrival = static_cast<Arrival>(args.arrival);
  launch.device = transport.device;
  launch.num_blocks = static_cast<uint32_t>(std::max(args.num_blocks, 1));
  launch.stream = stream;
  return LaunchTransport(ParamsOf(transport, args), launch);
}

}  // namespace
}  // namespace mok

int32_t mok_transport_create(int32_t device, MokTransport** transport) {
  auto created = mok::Create(device);
  if (!created.ok()) return mok::Report(created.status());
  *transport = created->release();
  return 0;
}

int32_t mok_transport_launch(MokTransport* transport, const MokTransportArgs* args, void* stream) {
  return mok::Report(mok::Launch(*transport, *args, stream));
}

int32_t mok_transport_ping_pong(MokTransport* transport, void* own_flag, void* peer_flag,
                                int32_t rounds, int32_t begins, void* stream) {
  mok::PingPongParams params{};
  params.own_flag = static_cast<uint64_t*>(own_flag);
  params.peer_flag = static_cast<uint64_t*>(peer_flag);
  params.rounds = rounds;
  params.begins = begins;
  params.wait = transport->wait.params();
  return mok::Report(mok::LaunchPingPong(params, transport->device, stream));
}

int32_t mok_transport_check(MokTransport* transport) {
  return mok::Report(mok::CheckDeviceWaitRecord(transport->wait.record()));
}

void mok_transport_destroy(MokTransport* transport) { delete transport; }

const char* mok_transport_error(void) { return mok::LastError().c_str(); }
