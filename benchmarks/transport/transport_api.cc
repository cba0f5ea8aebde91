#include "benchmarks/transport/transport_api.h"

#include <algorithm>
#include <memory>
#include <string>

#include "benchmarks/transport/transport_launch.h"
#include "mok_core/device/runtime.h"
#include "mok_core/status.h"

namespace mok {
namespace {

std::string& LastError() {
  static thread_local std::string text;
  return text;
}

int32_t Report(const Status& status) {
  if (!status.ok()) LastError() = status.ToString();
  return static_cast<int32_t>(status.code());
}

}  // namespace
}  // namespace mok

struct MokTransport {
  ~MokTransport() {
    for (void* const memory : {record, abort_flag}) {
      if (memory != nullptr) mok::Report(mok::runtime::Free(memory));
    }
  }

  int device = 0;
  void* record = nullptr;      // DeviceWaitRecord in mapped host memory
  void* abort_flag = nullptr;  // in device memory
  mok::DeviceWaitParams wait{};
};

namespace mok {
namespace {

constexpr uint64_t kTimeoutNs = 1'000'000'000;

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
  MOK_ASSIGN_OR_RETURN(transport->record,
                       runtime::AllocateMappedHost(sizeof(DeviceWaitRecord), "wait_record"));
  MOK_ASSIGN_OR_RETURN(transport->abort_flag,
                       runtime::AllocateDevice(device, sizeof(uint32_t), "abort_flag"));
  MOK_RETURN_IF_ERROR(runtime::Fill(transport->abort_flag, 0, sizeof(uint32_t)));
  transport->wait = {static_cast<DeviceWaitRecord*>(transport->record),
                     static_cast<uint32_t*>(transport->abort_flag), kTimeoutNs, device};
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
  params.wait = transport.wait;
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
  params.wait = transport->wait;
  return mok::Report(mok::LaunchPingPong(params, transport->device, stream));
}

int32_t mok_transport_check(MokTransport* transport) {
  const auto& record = *static_cast<const mok::DeviceWaitRecord*>(transport->record);
  return mok::Report(mok::CheckDeviceWaitRecord(record));
}

void mok_transport_destroy(MokTransport* transport) { delete transport; }

const char* mok_transport_error(void) { return mok::LastError().c_str(); }
