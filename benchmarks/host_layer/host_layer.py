"""Times MoK's host engine against the same layer in PyTorch, in one process, taking turns.

    ./bazelw run -c opt //benchmarks/host_layer -- --threads=2

Both use the same threads, inputs and dtype. Each iteration times forward and forward+backward of
both, in alternating order; medians are reported. Ratios above 1 mean that MoK is faster.
"""

import collections
import dataclasses
import json
import statistics
import time

import rich.box
import rich.console
import rich.table
import torch
from absl import app, flags

from benchmarks.host_layer.torch_layer import torch_moe
from mok_torch import functional
from mok_torch.reference import relative_error

_THREADS = flags.DEFINE_integer(
    "threads", None, "Of both; default: torch.get_num_threads().", 1, 1024
)
_ITERATIONS = flags.DEFINE_integer("iterations", 15, "Timed iterations.", lower_bound=1)
_PRECISION = flags.DEFINE_enum("precision", "bf16", ["bf16", "fp32"], "Of activations and weights.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object a shape instead of a table.")

_WARM_UPS = 3
# Longer than OpenMP's threads spin after a parallel region: else the layer that goes second, which
# has threads of its own, would share the cores with the idle threads of the first.
_PAUSE_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class Shape:
    """A layer on one rank."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    topk: int
    shared: int


SHAPES = {
    "train_lm": Shape(2048, 192, 192, 16, 2, 256),
    "small": Shape(1024, 1024, 512, 16, 4, 512),
    "few_large": Shape(512, 2048, 1024, 8, 2, 1024),
    "many_experts": Shape(1024, 1024, 256, 64, 6, 512),
    "h2880": Shape(512, 2880, 2880, 4, 2, 0),
}
_SHAPE = flags.DEFINE_multi_enum("shape", None, SHAPES, "Default: all.")


def make_inputs(shape: Shape, dtype: torch.dtype) -> tuple[dict, torch.Tensor]:
    """Arguments of functional.moe, all differentiable ones leaves, and the output's gradient."""
    torch.manual_seed(0)

    def draw(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size) * scale).to(dtype).requires_grad_()

    tokens, hidden, intermediate = shape.tokens, shape.hidden, shape.intermediate
    topk_weight, topk_idx = torch.randn(tokens, shape.experts).softmax(-1).topk(shape.topk)
    shared = None
    if shape.shared:
        shared = functional.SharedExpert(
            draw(shape.shared, hidden, scale=hidden**-0.5),
            draw(shape.shared, hidden, scale=hidden**-0.5),
            draw(hidden, shape.shared, scale=shape.shared**-0.5),
        )
    inputs = {
        "x": draw(tokens, hidden),
        "topk_idx": topk_idx,
        "topk_weight": topk_weight.requires_grad_(),
        "weights": (
            draw(shape.experts, intermediate, hidden, scale=hidden**-0.5),
            draw(shape.experts, intermediate, hidden, scale=hidden**-0.5),
            draw(shape.experts, hidden, intermediate, scale=intermediate**-0.5),
        ),
        "shared": shared,
    }
    return inputs, torch.randn(tokens, hidden).to(dtype)


def leaves_of(inputs: dict) -> list[torch.Tensor]:
    """The differentiable tensors."""
    shared = () if inputs["shared"] is None else inputs["shared"][:3]
    return [inputs["x"], inputs["topk_weight"], *inputs["weights"], *shared]


def mok_moe(x, topk_idx, topk_weight, weights, shared) -> torch.Tensor:
    return functional.moe(x, topk_idx, topk_weight, *weights, shared=shared)


def time_pass(layer, inputs: dict, d_out: torch.Tensor) -> tuple[float, float]:
    """Seconds of (forward, forward and backward)."""
    for leaf in leaves_of(inputs):
        leaf.grad = None
    time.sleep(_PAUSE_SECONDS)
    begin = time.perf_counter()
    out = layer(**inputs)
    forward = time.perf_counter() - begin
    out.backward(d_out)
    return forward, time.perf_counter() - begin


def check_same_result(inputs: dict, d_out: torch.Tensor) -> None:
    """Raises when the two layers do not compute the same thing."""
    results = []
    for layer in (mok_moe, torch_moe):
        for leaf in leaves_of(inputs):
            leaf.grad = None
        out = layer(**inputs)
        out.backward(d_out)
        results.append([out.detach(), *(leaf.grad for leaf in leaves_of(inputs))])
    worst = max(relative_error(ours, peers) for ours, peers in zip(*results, strict=True))
    if not worst < 2e-2:
        raise RuntimeError(f"the layers disagree: relative error {worst}")


def measure(shape: Shape, dtype: torch.dtype, iterations: int) -> dict[str, float]:
    """Median milliseconds of both layers, and PyTorch's over MoK's."""
    inputs, d_out = make_inputs(shape, dtype)
    check_same_result(inputs, d_out)
    layers = {"mok": mok_moe, "torch": torch_moe}
    seconds = collections.defaultdict(list)
    for iteration in range(_WARM_UPS + iterations):
        # Alternate who goes first, so that neither always inherits the other's caches.
        for name in sorted(layers, reverse=iteration % 2 == 1):
            forward, both = time_pass(layers[name], inputs, d_out)
            if iteration >= _WARM_UPS:
                seconds[name, "forward"].append(forward)
                seconds[name, "forward_backward"].append(both)
    result = {
        f"{name}_{which}_ms": statistics.median(values) * 1e3
        for (name, which), values in seconds.items()
    }
    for which in ("forward", "forward_backward"):
        result[f"{which}_ratio"] = result[f"torch_{which}_ms"] / result[f"mok_{which}_ms"]
    return result


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if _THREADS.value:
        torch.set_num_threads(_THREADS.value)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[_PRECISION.value]
    threads = torch.get_num_threads()
    title = f"median ms, {_PRECISION.value}, {threads} threads"
    table = rich.table.Table(title=title, box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("shape", no_wrap=True)
    for column in ("fwd MoK", "torch", "ratio", "fwd+bwd MoK", "torch", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in _SHAPE.value or SHAPES:
        shape = SHAPES[name]
        result = measure(shape, dtype, _ITERATIONS.value)
        if _JSON.value:
            record = {"shape": name, **dataclasses.asdict(shape), "precision": _PRECISION.value}
            print(json.dumps({**record, "threads": threads, **result}), flush=True)
        cells = [name]
        for which in ("forward", "forward_backward"):
            cells += [f"{result[f'{peer}_{which}_ms']:.1f}" for peer in ("mok", "torch")]
            cells.append(f"{result[f'{which}_ratio']:.2f}x")
        table.add_row(*cells)
    if not _JSON.value:
        rich.console.Console().print(table)


if __name__ == "__main__":
    app.run(main)
