"""Whether the layers compute the layer."""

from collections.abc import Collection

import torch
import torch.distributed as dist

from benchmarks.layer.cases import Case
from benchmarks.layer.catalogue import make_layers
from benchmarks.layer.layers import Layer
from benchmarks.layer.problem import make_problem, reference
from mok_torch.reference import relative_error

# ||result - reference|| / ||reference||: roundings of bf16 add up to less than 1 %.
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}

_SMALL = Case("small", 96, 256, 128, 3, 4, 64, "zipf")


def _require(error: float, tolerance: float, what: str) -> None:
    """The verdict is common: a rank that went on alone would hang."""
    worst = torch.tensor([error if error == error else float("inf")], dtype=torch.float64)
    worst = worst.cuda() if dist.get_backend() == "nccl" else worst
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if not worst.item() < tolerance:
        raise RuntimeError(f"{what}: relative error {worst.item():.2e}, expected < {tolerance}")


def check_layers(
    device: torch.device, dtype: torch.dtype, names: list[str] | None, forward_only: Collection[str]
) -> dict[str, float]:
    """Compares results at a small size with float64; the worst error of each layer.

    names, forward_only: on the command line.
    """
    problem = make_problem(_SMALL, device, dtype, seed=3)
    expected, expected_grads = reference(problem)
    errors = {}
    layers, without_backward = make_layers(problem, names, forward_only)
    for layer in layers:
        layer.plan()
        found = {"out": relative_error(layer.forward().cpu(), expected)}
        if layer.name not in without_backward:
            for name, grad in layer.backward().items():
                found[f"gradient of {name}"] = relative_error(grad.cpu(), expected_grads[name])
        for name, error in found.items():
            _require(error, _TOLERANCE[dtype], f"{layer.name}, {name}")
        errors[layer.name] = max(found.values())
    return errors


def check_same_results(layers: list[Layer], forward_only: set[str]) -> None:
    """At the size that is timed: every layer agrees with the last one, gradients included."""
    if len(layers) < 2:
        return

    def results(layer: Layer) -> dict[str, torch.Tensor]:
        layer.plan()
        found = {"out": layer.forward().clone()}
        return found if layer.name in forward_only else found | layer.backward()

    expected = results(layers[-1])
    for layer in layers[:-1]:
        for name, value in results(layer).items():
            if name not in expected:
                continue
            other = expected[name].double()
            error = (torch.linalg.vector_norm(value.double() - other) / other.norm()).item()
            what = f"{layer.name} and {layers[-1].name}, {name}"
            _require(error, _TOLERANCE[torch.bfloat16], what)
