"""Floors, ratios, and how results are shown: a table on the terminal, a JSON file, a plot."""

import dataclasses
import json
import pathlib

import rich.box
import rich.console
import rich.table

from benchmarks.layer.cases import Case, Load
from benchmarks.layer.measure import Rates, Times
from benchmarks.layer.memory import Memory

LINK_GIGABYTES = 372  # per second and direction: the copy engine's pull between two H200
MOK = "MoK"


@dataclasses.dataclass
class CaseResult:
    """Everything measured in one case."""

    case: Case
    load: Load
    rates: Rates
    turn_rates: Rates  # of products in turns with the layers
    times: dict[str, Times]
    link_bytes: dict[str, float]  # of each layer's forward
    memory: dict[str, Memory] = dataclasses.field(default_factory=dict)  # of a step, on GPUs

    def floor_ms(self, forward: bool, in_turns: bool = False) -> float:
        """The least time of a forward at the burst rate, or of both passes at the sustained one.

        FLOPs of the busiest rank over the rate or, if that takes longer, bytes of the busiest link
        direction over the link's rate. in_turns: at the rates that products have between layers.
        """
        rates = self.turn_rates if in_turns else self.rates
        passes, link_passes, rate = (1, 1, rates.burst)
        if not forward:
            passes, link_passes, rate = (3, 2, rates.sustained)
        compute = passes * self.case.flops(self.load.rows) / (rate * 1e12)
        link = link_passes * self.load.link_bytes / (LINK_GIGABYTES * 1e9)
        return max(compute, link) * 1e3

    def best_peer_ms(self, field: str) -> float | None:
        values = [getattr(times, field) for name, times in self.times.items() if name != MOK]
        return min((value for value in values if value is not None), default=None)

    def record(self) -> dict:
        """For JSON."""
        return {
            "case": dataclasses.asdict(self.case),
            "busiest_rank_rows": self.load.rows,
            "busiest_link_bytes": self.load.link_bytes,
            "burst_teraflops": self.rates.burst,
            "sustained_teraflops": self.rates.sustained,
            "burst_in_turns_teraflops": self.turn_rates.burst,
            "sustained_in_turns_teraflops": self.turn_rates.sustained,
            "forward_floor_ms": self.floor_ms(True),
            "forward_backward_floor_ms": self.floor_ms(False),
            "forward_floor_in_turns_ms": self.floor_ms(True, in_turns=True),
            "forward_backward_floor_in_turns_ms": self.floor_ms(False, in_turns=True),
            "layers": {
                name: dataclasses.asdict(times)
                | {"link_bytes": self.link_bytes[name]}
                | self._memory_record(name)
                for name, times in self.times.items()
            },
        }

    def _memory_record(self, name: str) -> dict:
        memory = self.memory.get(name)
        if memory is None:
            return {}
        return {
            "step_bytes": memory.measured,
            "needed_bytes": memory.needed,
            "backward_rows_bytes": memory.backward_rows,
        }


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else format(value, pattern)


def _rows(result: CaseResult):
    """One row of cells for each layer, the fastest forward first."""
    flops = result.case.flops(result.load.rows)
    for name, times in sorted(result.times.items(), key=lambda item: item[1].forward):
        cells = [name]
        for field, passes, link_passes in (("forward", 1, 1), ("forward_backward", 3, 2)):
            value, best = getattr(times, field), result.best_peer_ms(field)
            is_forward = field == "forward"
            rate = gigabytes = over_floor = over_turns = over_peer = None
            if value is not None:
                rate = passes * flops / value * 1e-9
                gigabytes = link_passes * result.link_bytes[name] / value * 1e-6
                over_floor = value / result.floor_ms(is_forward)
                over_turns = value / result.floor_ms(is_forward, in_turns=True)
                over_peer = None if best is None else best / value
            cells += [_number(value, ".3f"), _number(rate, ".0f"), _number(gigabytes, ".0f")]
            cells += [_number(ratio, ".2f") for ratio in (over_floor, over_turns, over_peer)]
            if is_forward:
                cells += [_number(times.planned_forward, ".3f"), _number(times.host, ".3f")]
        memory = result.memory.get(name)
        cells.append("-" if memory is None else f"{memory.measured * 1e-9:.2f}")
        for ratio in ("over_needed", "over_needed_with_rows"):
            cells.append("-" if memory is None else f"{getattr(memory, ratio):.2f}")
        yield cells


def print_result(result: CaseResult, console: rich.console.Console) -> None:
    """The table of one case."""
    rates, turn_rates = result.rates, result.turn_rates
    title = (
        f"{result.case.name}: floor {result.floor_ms(True):.3f} ms forward at the burst rate "
        f"({rates.burst:.0f} TFLOP/s), {result.floor_ms(False):.3f} ms forward+backward at the "
        f"sustained rate ({rates.sustained:.0f}); x turns: the same at {turn_rates.burst:.0f} and "
        f"{turn_rates.sustained:.0f} TFLOP/s, which products reach in turns with the layers; "
        "vs peer: the best peer's time over this one"
    )
    table = rich.table.Table(title=title, box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("layer", no_wrap=True)
    both = ("TFLOP/s", "link GB/s", "x floor", "x turns", "vs peer")
    for column in (
        "fwd ms",
        *both,
        "with plan ms",
        "host ms",
        "fwd+bwd ms",
        *both,
        "step GB",
        "x needed",
        "x with rows",
    ):
        table.add_column(column, justify="right")
    for cells in _rows(result):
        table.add_row(*cells)
    console.print(table)


def write_json(path: str, environment: dict, results: list[CaseResult]) -> None:
    document = {"environment": environment, "cases": [result.record() for result in results]}
    pathlib.Path(path).write_text(json.dumps(document, indent=1) + "\n")


def write_plot(path: str, results: list[CaseResult]) -> None:
    """Times over the floor, one group of bars a case; below 1 is impossible."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = sorted({name for result in results for name in result.times})
    figure, panels = pyplot.subplots(2, 1, figsize=(4 + 1.6 * len(results), 9), squeeze=False)
    for panel, field in zip(panels[:, 0], ("forward", "forward_backward"), strict=True):
        for index, name in enumerate(names):
            for group, result in enumerate(results):
                value = getattr(result.times.get(name), field, None)
                if value is None:
                    continue
                height = value / result.floor_ms(field == "forward")
                width = 0.8 / len(names)
                at = group - 0.4 + (index + 0.5) * width
                label = name if group == 0 else None
                panel.bar(at, height, width, color=f"C{index}", label=label)
        panel.axhline(1, color="black", linewidth=1)
        panel.set_xticks(range(len(results)), [result.case.name for result in results], rotation=20)
        panel.set_ylabel(f"{field.replace('_', '+')}: time over floor")
    panels[0, 0].legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
