#include "benchmarks/transport/transport_launch.h"

#include "benchmarks/transport/transport_kernel.h"
#include "mok_core/device/runtime.h"

namespace mok {
namespace {

Status Validate(const TransportParams& params) {
  if (params.row_bytes < 16 || params.row_bytes % 16 != 0) {
    return InvalidArgumentError("row_bytes = ", params.row_bytes, ", expected a multiple of 16");
  }
  if (params.num_rows < 0 || params.rows_per_tile < 1) {
    return InvalidArgumentError("num_rows = ", params.num_rows,
                                ", rows_per_tile = ", params.rows_per_tile,
                                ", expected at least 0 and 1");
  }
  if (params.warps < 1 || params.warps > kTransportWarps) {
    return InvalidArgumentError("warps = ", params.warps, ", expected 1 to ", kTransportWarps);
  }
  return OkStatus();
}

}  // namespace

Status LaunchTransport(const TransportParams& params, const TransportLaunch& launch) {
  MOK_RETURN_IF_ERROR(Validate(params));
  runtime::LaunchConfig config;
  config.grid = {launch.num_blocks, 1, 1};
  config.block = {32 * kTransportWarps, 1, 1};
  config.shared_bytes = TransportSharedBytes();
  config.registers_per_thread = 128;
  config.device = launch.device;
  config.stream = launch.stream;
  config.name = "transport";
  const void* kernel = TransportKernel(launch.mechanism, launch.side, launch.arrival);
  return runtime::LaunchKernelAddress(kernel, config, &params, sizeof params);
}

Status LaunchPingPong(const PingPongParams& params, int device, void* stream) {
  runtime::LaunchConfig config;
  config.grid = {1, 1, 1};
  config.block = {32, 1, 1};
  config.device = device;
  config.stream = stream;
  config.name = "ping_pong";
  return runtime::LaunchKernelAddress(PingPongKernel(), config, &params, sizeof params);
}

}  // namespace mok
