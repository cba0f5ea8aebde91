"""Times rows between two GPUs: pull and push, bulk copies and vectors, SMs used, flags.

    ./bazelw run //benchmarks/transport -- --json=/tmp/transport.json --plot=/tmp/transport.png

One process drives both GPUs; each moves rows of 14 KiB in random order, from or to the other, both
at once. GB/s are of the busiest link direction.
"""

import dataclasses
import json
import pathlib
import random

import rich.box
import rich.console
import rich.progress
import rich.table
import torch
from absl import app, flags

from benchmarks import outputs
from benchmarks.transport.library import Library
from benchmarks.transport.transfers import Transfer, TwoGpus

_LIBRARY = flags.DEFINE_string("library", None, "libtransport.so; default: beside this file.")
_JSON = outputs.define_json()
_PLOT = outputs.define_plot("GB/s over SMs")

_MAX_ROWS = 14336
_SMS = (1, 2, 4, 8, 16, 32, 64, 132)
# Warps in one SM: beside a GEMM there is one; an SM that only communicates has room for 16.
_VARIANTS = (("bulk", 1), ("bulk", 16), ("vector", 1), ("vector", 16))
_SIDES = ("pull", "push")


def sweep() -> list[Transfer]:
    """Sides, mechanisms and warps over the number of SMs."""
    return [
        Transfer(side, mechanism, sms, warps, rows=(_rows(sms),) * 2)
        for sms in _SMS
        for mechanism, warps in _VARIANTS
        for side in _SIDES
    ]


def _rows(sms: int) -> int:
    """Enough for a millisecond, few enough for one SM."""
    return min(8192, max(1024, 512 * sms))


def skewed() -> list[Transfer]:
    """As many rows in all, 7 of 8 of them into GPU 0."""
    return [
        Transfer(side, "bulk", sms, warps, rows=rows)
        for sms, warps in ((132, 1), (16, 16))
        for rows in ((8192, 8192), (14336, 2048))
        for side in _SIDES
    ]


def told() -> list[Transfer]:
    """What it costs to tell that tiles have arrived: a pull tells its GPU, a push the other."""
    return [
        Transfer(side, mechanism, sms, warps, arrival=arrival, rows_per_tile=rows_per_tile)
        for sms, warps in ((132, 1), (16, 16))
        for mechanism in ("bulk", "vector")
        for side, arrivals in (("pull", ("untold", "own")), ("push", ("untold", "own", "peer")))
        for arrival in arrivals
        for rows_per_tile in (1, 4, 16)
    ]


def copy_engine() -> list[Transfer]:
    return [Transfer(side, "copy_engine", sms=0, warps=0) for side in _SIDES]


GROUPS = {"sweep": sweep, "skewed": skewed, "told": told, "copy_engine": copy_engine}

_GROUP = flags.DEFINE_multi_enum("group", list(GROUPS), list(GROUPS), "What to time.")


@dataclasses.dataclass
class Result:
    """One transfer's median."""

    transfer: Transfer
    group: str
    milliseconds: float

    @property
    def gigabytes(self) -> float:
        """Per second."""
        return self.transfer.bytes_of_busiest_direction / self.milliseconds * 1e-6

    def record(self) -> dict:
        rates = {"milliseconds": self.milliseconds, "gigabytes_per_second": self.gigabytes}
        return {"group": self.group, **dataclasses.asdict(self.transfer), **rates}


def sweep_table(results: list[Result]) -> rich.table.Table:
    """GB/s, one row for each number of SMs."""
    table = rich.table.Table(title="GB/s per direction, both at once", box=rich.box.SIMPLE_HEAD)
    table.add_column("SMs", justify="right")
    columns = [(side, *variant) for variant in _VARIANTS for side in _SIDES]
    for side, mechanism, warps in columns:
        table.add_column(f"{side} {mechanism} x{warps}", justify="right")
    rates = {
        (r.transfer.sms, r.transfer.side, r.transfer.mechanism, r.transfer.warps): r.gigabytes
        for r in results
        if r.group == "sweep"
    }
    for sms in _SMS:
        table.add_row(str(sms), *(f"{rates[(sms, *column)]:.0f}" for column in columns))
    return table


def list_table(results: list[Result]) -> rich.table.Table:
    """Everything but the sweep."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    names = ("group", "side", "mechanism", "SMs", "warps", "rows in", "told", "rows a tile")
    for name in (*names, "ms", "GB/s"):
        table.add_column(name, justify="right")
    for r in results:
        if r.group == "sweep":
            continue
        t = r.transfer
        cells = (r.group, t.side, t.mechanism, t.sms, t.warps, t.rows, t.arrival, t.rows_per_tile)
        table.add_row(*map(str, cells), f"{r.milliseconds:.3f}", f"{r.gigabytes:.0f}")
    return table


def write_plot(path: str, results: list[Result]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(8, 5))
    for mechanism, warps in _VARIANTS:
        for side in _SIDES:
            points = [
                (r.transfer.sms, r.gigabytes)
                for r in results
                if r.group == "sweep"
                and (r.transfer.side, r.transfer.mechanism, r.transfer.warps)
                == (side, mechanism, warps)
            ]
            style = "-o" if side == "pull" else "--s"
            panel.plot(*zip(*points, strict=True), style, label=f"{side}, {mechanism} x{warps}")
    for r in results:
        if r.group == "copy_engine":
            panel.axhline(r.gigabytes, color="grey", linestyle=":")
    panel.set_xscale("log", base=2)
    panel.set_xlabel("SMs of each GPU")
    panel.set_ylabel("GB/s per direction (dotted: copy engines)")
    panel.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def measure(gpus: TwoGpus, groups: list[str], console: rich.console.Console) -> list[Result]:
    """Every transfer is checked, then timed, in random order."""
    work = [(group, transfer) for group in groups for transfer in GROUPS[group]()]
    order = list(range(len(work)))
    random.Random(0).shuffle(order)
    results = {}
    for index in rich.progress.track(order, console=console, transient=True):
        group, transfer = work[index]
        gpus.check(transfer)
        results[index] = Result(transfer, group, gpus.time(transfer))
    return [results[index] for index in range(len(work))]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if torch.cuda.device_count() < 2:
        raise app.UsageError("two GPUs are needed")
    path = _LIBRARY.value or str(pathlib.Path(__file__).parent / "libtransport.so")
    gpus = TwoGpus(Library(path), _MAX_ROWS, Transfer("pull", "bulk").row_bytes)
    console = rich.console.Console(width=150)
    results = measure(gpus, _GROUP.value, console)
    round_trip = gpus.flag_round_trip_us()
    swept = "sweep" in _GROUP.value
    if swept:
        console.print(sweep_table(results))
    console.print(list_table(results))
    console.print(f"flag to the other GPU and back: {round_trip:.2f} us")
    if _JSON.value:
        document = {
            "device": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "flag_round_trip_us": round_trip,
            "transfers": [result.record() for result in results],
        }
        path = outputs.output_path(_JSON.value)
        pathlib.Path(path).write_text(json.dumps(document, indent=1) + "\n")
    if _PLOT.value and swept:
        write_plot(outputs.output_path(_PLOT.value), results)


if __name__ == "__main__":
    app.run(main)
