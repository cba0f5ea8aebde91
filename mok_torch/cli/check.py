"""`python -m mok_torch check`: self-test of this machine.

Runs the layer, forward and backward, over several virtual ranks and compares everything with a
float64 reference; then the same batch on 1, 2 and 3 ranks, which must agree bit for bit.
"""

from __future__ import annotations

import dataclasses
import itertools

import rich.box
import rich.console
import rich.measure
import rich.table
import torch
from absl import app, flags

from mok_torch import _C
from mok_torch.cuda_engine import cuda_device
from mok_torch.functional import MoKConfig
from mok_torch.layer import PRECISIONS
from mok_torch.self_test import Case, Comparison, compare, make_batch, run_layer

_ISA = flags.DEFINE_enum("isa", None, list(_C.ISA_NAMES), "Instruction set; default: the best.")
_DEVICE = flags.DEFINE_enum("device", "cpu", ["cpu", "cuda"], "Where the layer runs.")
_PRECISION = flags.DEFINE_multi_enum(
    "precision", list(PRECISIONS), list(PRECISIONS), "Precisions to check; bf16 on a GPU."
)

CASES = (
    Case("one rank", tokens=(130,), shared=64),
    Case("two ranks", tokens=(64, 64), shared=160, scaled_shared=True),
    Case("uneven ranks", tokens=(0, 5, 17), experts=5, topk=3, no_route_share=0.2),
    Case("clamped SwiGLU", tokens=(40, 24), shared=96, swiglu_limit=1.0),
    Case("small inputs", tokens=(100, 28), input_scale=0.02, shared=64),
    Case(
        "recomputation",
        tokens=(300, 212),
        experts=4,
        shared=64,
        config=MoKConfig(minibatch_size=128, macrobatch_size=128),
    ),
)
_SAME_BATCH = Case("", tokens=(), experts=5, topk=3, no_route_share=0.1)
_SPLITS = ((96,), (40, 56), (7, 0, 89))


def splits_agree(isa: str | None, dtype: torch.dtype, device: str = "cpu") -> bool:
    """Whether one batch gives the same bits over 1, 2 and 3 ranks and two engine settings."""
    results = []
    for tokens, workers in itertools.product(_SPLITS, (1, 2)):
        config = MoKConfig(isa=isa, num_threads=workers, fwd_num_comm_sms=workers - 1)
        case = dataclasses.replace(_SAME_BATCH, tokens=tokens, config=config)
        results.append(run_layer(case, make_batch(case, dtype), device))
    return all(
        torch.equal(result[name], results[0][name]) for result in results for name in results[0]
    )


def _precisions(device: str) -> list[str]:
    """Those to check on the device."""
    wanted = list(dict.fromkeys(_PRECISION.value))
    able = [name for name in wanted if device == "cpu" or name == "bf16"]
    if not able:
        raise app.UsageError(f"--device={device} computes in bf16 only, not in {wanted}")
    return able


def _title(device: str, isa: str | None) -> str:
    if device == "cpu":
        return f"MoE layer, forward and backward, on {isa or _C.ISA_NAMES[_C.best_isa()]}"
    return f"MoE layer, forward and backward, on {torch.cuda.get_device_name()}"


def _cells(case: Case, precision: str, comparisons: list[Comparison]) -> tuple[str, ...]:
    """A row of the table: the tensor that comes closest to its limit, and the verdict on all."""
    worst = max(comparisons, key=lambda c: (not c.ok, c.error / c.limit))
    row_error = max(c.row_error for c in comparisons if c.row_error is not None)
    errors = (worst.tensor, f"{worst.error:.1e}", f"{worst.limit:.1e}", f"{row_error:.1e}")
    return case.name, precision, str(len(case.tokens)), *errors, _verdict(comparisons)


def _verdict(comparisons: list[Comparison]) -> str:
    return "[green]ok" if all(c.ok for c in comparisons) else "[bold red]FAILED"


def _console_as_wide_as(table: rich.table.Table) -> rich.console.Console:
    """A console that cuts nothing off the table, however narrow the terminal or what it takes for
    the width of a file."""
    console = rich.console.Console()
    unbounded = console.options.update(max_width=10**6)
    needed = rich.measure.Measurement.get(console, unbounded, table).maximum
    return rich.console.Console(width=max(console.width, needed))


def main(argv: list[str]) -> int:
    """Prints the table; 1 when something failed."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    isa, device = _ISA.value, _DEVICE.value
    if device == "cuda":
        try:
            cuda_device(torch.device("cuda"))
        except ValueError as error:
            raise app.UsageError(str(error)) from error
    table = rich.table.Table(
        title=_title(device, isa), box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for column in ("case", "", "ranks", "worst tensor", "error", "limit", "row", "result"):
        table.add_column(column, no_wrap=True)
    ok = True
    for precision in _precisions(device):
        dtype = PRECISIONS[precision]
        for case in CASES:
            case = dataclasses.replace(case, config=dataclasses.replace(case.config, isa=isa))
            comparisons = compare(case, dtype, device)
            ok &= all(comparison.ok for comparison in comparisons)
            table.add_row(*_cells(case, precision, comparisons))
        same = splits_agree(isa, dtype, device)
        ok &= same
        status = "[green]ok" if same else "[bold red]FAILED"
        table.add_row("same bits", precision, "1 to 3", "all", "", "", "", status)
    console = _console_as_wide_as(table)
    console.print(table)
    console.print("all checks passed" if ok else "[bold red]some checks FAILED")
    return 0 if ok else 1
