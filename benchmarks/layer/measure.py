"""The protocol: layers take turns, ranks are aligned, rates of the machine are of the same run.

Power capping makes any other comparison worthless: what a kernel's rate is depends on what ran
before it. Rates are therefore measured twice, by themselves and in turns with the layers. Each
iteration times every layer once, in an order that all ranks draw alike; each timed
pass follows a sleep on the device, which hides the host's launches, and an all-reduce of 4 bytes,
which aligns the ranks. A pass costs what it costs the slowest rank; medians are reported.
"""

import dataclasses
import random
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.layer.layers import Layer

# At the highest clock of an H200: a sleep is never shorter than asked for.
_SLEEP_CYCLES_PER_MS = 1_980_000
_GEMM_SIZE, _TINY_GEMM = 8192, 256
_ROW, _TURN_PRODUCTS = 60, 5
_PAUSE_MS = 20
_PLAN_EVERY = 3


class Clock:
    """Marks moments of the current stream, or of the host where there is no GPU.

    sleep_ms: of the device before each pass. What the host needs beyond it to launch a pass is in
    the pass's time: a longer sleep shows the device's time alone.
    """

    def __init__(self, device: torch.device, sleep_ms: float = 0.3):
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._sleep_cycles = int(sleep_ms * _SLEEP_CYCLES_PER_MS)
        self._aligned = torch.zeros(1, device=device)

    def align(self) -> None:
        if self._is_cuda:
            torch.cuda._sleep(self._sleep_cycles)
        dist.all_reduce(self._aligned)

    def mark(self):
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()

    def elapsed_ms(self, begin, end) -> float:
        if not self._is_cuda:
            return (end - begin) * 1e3
        return begin.elapsed_time(end)


@dataclasses.dataclass
class Rates:
    """TFLOP/s of the Product on the slowest rank."""

    burst: float  # single products
    sustained: float  # products in a row


class Product:
    """The product whose rates are measured; takes turns with layers as one of them would.

    Of random square matrices: 8192 wide in bf16 on GPUs; 256 wide in fp32 on CPUs, where it stands
    for nothing. Its forward is one product. With its backward there are _TURN_PRODUCTS in a row, on
    an H200 as long as both passes of a large layer.
    """

    name = "product"

    def __init__(self, device: torch.device):
        is_cuda = device.type == "cuda"
        self.size = size = _GEMM_SIZE if is_cuda else _TINY_GEMM
        dtype = torch.bfloat16 if is_cuda else torch.float32
        self._a, self._b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        self._out = torch.empty_like(self._a)
        self._gigaflop = 2.0 * size**3 * 1e-9

    def run(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._a, self._b, out=self._out)

    def plan(self) -> None:
        pass

    def forward(self) -> None:
        self.run(1)

    def backward(self) -> None:
        self.run(_TURN_PRODUCTS - 1)

    def rates(self, single_ms: float, row_ms: float, row: int = _TURN_PRODUCTS) -> Rates:
        """From the times of one product and of `row` in a row."""
        return Rates(self._gigaflop / single_ms, row * self._gigaflop / row_ms)


@dataclasses.dataclass
class Times:
    """Median milliseconds."""

    forward: float
    planned_forward: float | None  # with the plan (routing table) made anew; None: too few turns
    host: float  # of the host, in the call of the forward; beyond the sleep it delays the GPU
    forward_backward: float | None  # None: the layer has no backward


def time_pass(
    layer: Layer | Product, clock: Clock, with_plan: bool, with_backward: bool
) -> list[float]:
    """Milliseconds in the host's forward call; to the forward's end; to the backward's end."""
    clock.synchronize()
    clock.align()
    marks = [clock.mark()]
    if with_plan:
        layer.plan()
    host = time.perf_counter()
    layer.forward()
    host = (time.perf_counter() - host) * 1e3
    marks.append(clock.mark())
    if with_backward:
        layer.backward()
        marks.append(clock.mark())
    clock.synchronize()
    return [host, *(clock.elapsed_ms(marks[0], mark) for mark in marks[1:])]


def measure_layers(
    layers: list[Layer | Product],
    forward_only: set[str],
    clock: Clock,
    iterations: int,
    warm_ups: int,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Times]:
    """Collective. forward_only: names of layers whose backward is left out."""
    order, device = random.Random(0), clock.device
    forward = {layer.name: [] for layer in layers}
    planned, both, host = ({name: [] for name in forward} for _ in range(3))
    # Every iteration without the plan, every third one with it.
    turns = [(layer, False) for layer in layers]
    turns += [(layer, True) for layer in layers if not isinstance(layer, Product)]
    for layer in layers:
        layer.plan()
    for iteration in range(warm_ups + iterations):
        order.shuffle(turns)
        for layer, with_plan in turns:
            if with_plan and iteration % _PLAN_EVERY != 0:
                continue
            has_backward = layer.name not in forward_only and not with_plan
            times = time_pass(layer, clock, with_plan, has_backward)
            if iteration < warm_ups:
                continue
            (planned if with_plan else forward)[layer.name].append(times[1])
            if not with_plan:
                host[layer.name].append(times[0])
            if has_backward:
                both[layer.name].append(times[2])
        progress()
    return {
        name: Times(
            _median_of_slowest(forward[name], device),
            _median_of_slowest(planned[name], device) if planned[name] else None,
            _median_of_slowest(host[name], device),
            _median_of_slowest(both[name], device) if both[name] else None,
        )
        for name in forward
    }


def _median_of_slowest(times: list[float], device: torch.device) -> float:
    """The slowest rank of each iteration, then the median over iterations."""
    slowest = torch.tensor(times, device=device, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.median().item()


def measure_rates(device: torch.device, product: Product) -> Rates:
    """Collective: all ranks at once, as in a layer. Single products 20 ms apart, 60 in a row."""
    # Between single products the device spins: that draws little power, and an idle device seems to
    # lower its clock, so that a product 50 ms after the last one ran slower than 60 in a row.
    clock, spaced = Clock(device), Clock(device, _PAUSE_MS)

    def run(count: int, before: Clock = clock) -> float:
        clock.synchronize()
        before.align()
        begin = clock.mark()
        product.run(count)
        end = clock.mark()
        clock.synchronize()
        return clock.elapsed_ms(begin, end)

    run(3)
    single = _median_of_slowest([run(1, spaced) for _ in range(9)], device)
    return product.rates(single, _median_of_slowest([run(_ROW)], device), _ROW)
