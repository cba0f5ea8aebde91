"""Transfers between two GPUs: what one is, and how it is run, checked and timed."""

import dataclasses
import statistics

import torch

from benchmarks.transport.library import (
    ARRIVALS,
    MECHANISMS,
    SIDES,
    Args,
    CopyEngine,
    Library,
    Transport,
)

_SLEEP_CYCLES = 600_000  # 0.3 ms at 1.98 GHz: longer than the host's launches
_TIMES = 10
_PING_PONG_ROUNDS = 2000


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Rows that both GPUs move at the same time, each from or to the other."""

    side: str  # pull, push
    mechanism: str  # bulk, vector; copy_engine
    sms: int = 132
    warps: int = 1
    rows: tuple[int, int] = (8192, 8192)  # that cross into GPU 0 and into GPU 1
    row_bytes: int = 14336
    arrival: str = "untold"
    rows_per_tile: int = 16

    @property
    def bytes_of_busiest_direction(self) -> int:
        return max(self.rows) * self.row_bytes


class TwoGpus:
    """Buffers, streams and kernels of both GPUs."""

    def __init__(self, library: Library, max_rows: int, row_bytes: int):
        self.devices = [torch.device("cuda", index) for index in range(2)]
        self.transports = [Transport(library, index) for index in range(2)]
        self.streams = [torch.cuda.Stream(device) for device in self.devices]
        self._copy_engine = CopyEngine()
        size = (max_rows, row_bytes // 4)

        def per_device(make):
            return [make(index, device) for index, device in enumerate(self.devices)]

        def draw(index: int, device: torch.device) -> torch.Tensor:
            generator = torch.Generator(device).manual_seed(index)
            return torch.randint(2**31 - 1, size, device=device, generator=generator).int()

        self._source = per_device(draw)
        self._destination = per_device(
            lambda index, device: torch.zeros(size, device=device, dtype=torch.int32)
        )
        self._peer = per_device(
            lambda index, device: torch.full((max_rows,), 1 - index, device=device).int()
        )
        # Rows as a routing table has them: in no order of the other GPU's memory.
        self._row = per_device(lambda index, device: torch.randperm(max_rows, device=device).int())
        self._counters = per_device(
            lambda index, device: torch.zeros(max_rows, device=device, dtype=torch.int64)
        )

    def _args(self, transfer: Transfer, gpu: int) -> Args:
        """Of the launch on `gpu`: it reads for itself, or writes for the other."""
        pull = transfer.side == "pull"
        remote, local = (self._source, self._destination)[:: 1 if pull else -1]
        args = Args(
            device=gpu,
            mechanism=MECHANISMS.index(transfer.mechanism),
            side=SIDES.index(transfer.side),
            arrival=ARRIVALS.index(transfer.arrival),
            num_blocks=transfer.sms,
            warps=transfer.warps,
            num_rows=transfer.rows[gpu if pull else 1 - gpu],
            rows_per_tile=transfer.rows_per_tile,
            row_bytes=transfer.row_bytes,
            rank=self._peer[gpu].data_ptr(),
            row=self._row[gpu].data_ptr(),
            local=local[gpu].data_ptr(),
            counters=self._counters[gpu].data_ptr(),
        )
        for index in range(2):
            args.of_rank[index] = remote[index].data_ptr()
            args.counters_of_rank[index] = self._counters[index].data_ptr()
        return args

    def _start(self, transfer: Transfer, gpu: int) -> None:
        """Launches on the current stream."""
        if transfer.mechanism != "copy_engine":
            self.transports[gpu].launch(self._args(transfer, gpu), self.streams[gpu])
            return
        # The engine of the GPU whose stream is current works: pull into it, push out of it.
        into = gpu if transfer.side == "pull" else 1 - gpu
        rows = transfer.rows[into]
        to, source = self._destination[into][:rows], self._source[1 - into][:rows]
        self._copy_engine.copy(to, source, self.streams[gpu])

    def run(self, transfer: Transfer) -> float:
        """Milliseconds from the common start to the end of the slower GPU."""
        marks = []
        start = torch.cuda.Event()
        with torch.cuda.device(0), torch.cuda.stream(self.streams[0]):
            torch.cuda._sleep(_SLEEP_CYCLES)
            start.record()
        for gpu, device in enumerate(self.devices):
            with torch.cuda.device(device), torch.cuda.stream(self.streams[gpu]):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.streams[gpu].wait_event(start)
                begin.record()
                self._start(transfer, gpu)
                end.record()
                marks.append((begin, end))
        self.synchronize()
        return max(begin.elapsed_time(end) for begin, end in marks)

    def synchronize(self) -> None:
        for device in self.devices:
            torch.cuda.synchronize(device)

    def check(self, transfer: Transfer) -> None:
        """Raises unless every row arrives where the table says and every tile is told once."""
        for buffer in (*self._destination, *self._counters):
            buffer.zero_()
        self.synchronize()
        self.run(transfer)
        for gpu in range(2):
            into = gpu if transfer.side == "pull" else 1 - gpu
            rows = transfer.rows[into]
            table = self._row[gpu][:rows].long()
            source, found = self._source[1 - into], self._destination[into]
            if transfer.mechanism == "copy_engine":
                expected, found = source[:rows], found[:rows]
            elif transfer.side == "pull":
                expected, found = source[table.to(source.device)], found[:rows]
            else:
                expected, found = source[:rows], found[table.to(found.device)]
            if not torch.equal(expected.cpu(), found.cpu()):
                raise RuntimeError(f"{transfer}: rows into GPU {into} differ")
            if transfer.arrival == "untold":
                continue
            told = into if transfer.arrival == "peer" else gpu
            tiles = -(-rows // transfer.rows_per_tile)
            if not bool((self._counters[told][:tiles] == 1).all()):
                raise RuntimeError(f"{transfer}: tiles not told once")
        for transport in self.transports:
            transport.check()

    def time(self, transfer: Transfer) -> float:
        """Median milliseconds."""
        self.run(transfer)
        return statistics.median(self.run(transfer) for _ in range(_TIMES))

    def flag_round_trip_us(self) -> float:
        """A flag to the other GPU and back: store-release and load-acquire at system scope."""
        flags = [torch.zeros(1, device=device, dtype=torch.int64) for device in self.devices]
        self.synchronize()
        marks = []
        for gpu, device in enumerate(self.devices):
            with torch.cuda.device(device), torch.cuda.stream(self.streams[gpu]):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                if gpu == 0:
                    torch.cuda._sleep(_SLEEP_CYCLES)
                begin.record()
                self.transports[gpu].ping_pong(
                    flags[gpu], flags[1 - gpu], _PING_PONG_ROUNDS, gpu == 0, self.streams[gpu]
                )
                end.record()
                marks.append((begin, end))
        self.synchronize()
        for transport in self.transports:
            transport.check()
        return min(b.elapsed_time(e) for b, e in marks) * 1e3 / _PING_PONG_ROUNDS
