"""Times MoK's Hopper grouped GEMM against torch._grouped_mm and cuBLAS, one product per expert.

    ./bazelw run -c opt //benchmarks/grouped_gemm -- --json=/tmp/grouped_gemm.json

Shapes: gate+up and down of four models, rows of one rank of EP = 64 with 2048 tokens per GPU. Each
iteration runs every variant once, in random order, because the power cap makes a variant's rate
depend on what ran before it; each run follows a sleep on the device, which hides the host's launch
time. Reported: the median and the best peer's median over it (above 1: MoK is faster).
"""

import dataclasses
import json
import pathlib
import random
import statistics
from collections.abc import Callable

import rich.console
import rich.progress
import rich.table
import torch
from absl import app, flags

from benchmarks import outputs
from benchmarks.grouped_gemm.library import GroupedGemm, Library

_LIBRARY = flags.DEFINE_string("library", None, "libgrouped_gemm.so; default: beside this file.")
_ITERATIONS = flags.DEFINE_integer("iterations", 32, "Timed iterations.", lower_bound=1)
_PANELS = flags.DEFINE_multi_integer("panel", [], "Further row blocks per panel of the raster.")
_NATURAL = flags.DEFINE_bool("natural", False, "Also time the natural column order.")
_JSON = outputs.define_json()

_WARM_UPS = 8
_SLEEP_CYCLES = 600_000  # 0.3 ms at 1.98 GHz


@dataclasses.dataclass(frozen=True)
class Shape:
    """C[rows of e] = A[rows of e] B[e]^T. gate_up: n is twice the expert's intermediate size."""

    counts: tuple[int, ...]
    n: int
    k: int
    gate_up: bool

    @property
    def flops(self) -> float:
        return 2.0 * sum(self.counts) * self.n * self.k


def model_shapes(hidden: int, intermediate: int, counts: tuple[int, ...]) -> dict[str, Shape]:
    return {
        "gate_up": Shape(counts, 2 * intermediate, hidden, True),
        "down": Shape(counts, hidden, intermediate, False),
    }


MODELS = {
    "kimi": model_shapes(7168, 2048, (2731,) * 4 + (2730,) * 2),
    "glm": model_shapes(6144, 2048, (4096,) * 4),
    "qwen": model_shapes(4096, 1024, (2560,) * 8),
    "deepseek": model_shapes(7168, 3072, (2048,) * 6),
    # Few tokens: reading the weights bounds these.
    "kimi_64_rows": model_shapes(7168, 2048, (64,) * 6),
    "kimi_uneven": model_shapes(7168, 2048, (9000, 4100, 2000, 900, 320, 64)),
}
SHAPES = {
    f"{model} {name}": shape for model, both in MODELS.items() for name, shape in both.items()
}
_SHAPE = flags.DEFINE_multi_enum("shape", None, SHAPES, "Default: all.")


class Problem:
    """Inputs of one shape, the variants that compute it and where they leave their results."""

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0):
        self.shape = shape
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*size: int, scale: float = 1.0) -> torch.Tensor:
            values = torch.randn(*size, device=device, generator=generator, dtype=torch.bfloat16)
            return values.mul_(scale)

        counts = torch.tensor(shape.counts, device=device, dtype=torch.int32)
        ends = counts.cumsum(0).int()
        rows, experts = sum(shape.counts), len(shape.counts)
        self.a = draw(rows, shape.k)
        self.b = draw(experts, shape.n, shape.k, scale=shape.k**-0.5)
        self.rows = {"expert_begin": ends - counts, "expert_count": counts}
        self.ends = ends
        self.out = torch.empty(rows, shape.n, device=device, dtype=torch.bfloat16)
        self.peer_out = torch.empty_like(self.out)

    def ours(self, library: Library, **options) -> GroupedGemm:
        tensors = {"a": self.a, "weights": self.b, "out": self.out, **self.rows}
        return GroupedGemm(library, **options, **tensors)

    def ours_swiglu(self, library: Library, **options) -> GroupedGemm:
        """The same products with g, u and h as results."""
        gate, up = (half.contiguous() for half in self.b.chunk(2, dim=1))
        results = {name: torch.empty_like(self.out[:, ::2]).contiguous() for name in ("gate", "up")}
        hidden = torch.empty_like(results["gate"])
        tensors = {"a": self.a, "weights": gate, "weights_up": up, "out": hidden, **results}
        return GroupedGemm(library, **options, **tensors, **self.rows)

    def grouped_mm(self) -> torch.Tensor:
        return torch._grouped_mm(self.a, self.b.transpose(1, 2), offs=self.ends)

    def cublas(self) -> Callable[[], None]:
        a = self.a.split(self.shape.counts)
        out = self.peer_out.split(self.shape.counts)

        def run() -> None:
            for expert, weights in enumerate(self.b):
                torch.mm(a[expert], weights.T, out=out[expert])

        return run


def check_same_result(problem: Problem, ours: GroupedGemm) -> None:
    """Raises when our result differs from cuBLAS's by more than rounding, or has a NaN."""
    problem.out.fill_(float("nan"))
    ours()
    problem.cublas()()
    torch.cuda.synchronize()
    ours.check()
    difference = (problem.out.float() - problem.peer_out.float()).norm()
    error = (difference / problem.peer_out.float().norm()).item()
    if not error < 4e-3:
        raise RuntimeError(f"the results disagree: relative error {error}")


def elapsed_ms(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_SLEEP_CYCLES)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def medians(variants: dict, iterations: int, advance: Callable[[], None]) -> dict[str, float]:
    """Median milliseconds of every variant, all run in each iteration in random order."""
    times = {name: [] for name in variants}
    for iteration in range(_WARM_UPS + iterations):
        for name in random.sample(list(variants), len(variants)):
            ms = elapsed_ms(variants[name])
            if iteration >= _WARM_UPS:
                times[name].append(ms)
        advance()
    return {name: statistics.median(values) for name, values in times.items()}


def measure(shape: Shape, library: Library, iterations: int, advance: Callable[[], None]) -> dict:
    """Milliseconds of every variant; "mok" is the form the layer uses by default."""
    problem = Problem(shape, torch.device("cuda", torch.cuda.current_device()))
    ours = {"mok": problem.ours(library)}
    if _NATURAL.value:
        ours["mok natural"] = problem.ours(library, permuted=False)
    for panel in _PANELS.value:
        ours[f"mok panel {panel}"] = problem.ours(library, panel=panel)
    for variant in ours.values():
        check_same_result(problem, variant)
    if shape.gate_up:
        ours["mok swiglu"] = problem.ours_swiglu(library)
        if _NATURAL.value:
            ours["mok swiglu natural"] = problem.ours_swiglu(library, permuted=False)
    peers = {"grouped_mm": problem.grouped_mm, "cublas": problem.cublas()}
    result = medians({**ours, **peers}, iterations, advance)
    for variant in ours.values():
        variant.check()
    return {"ms": result, "best_peer_ms": min(result[name] for name in peers)}


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    path = _LIBRARY.value or str(pathlib.Path(__file__).parent / "libgrouped_gemm.so")
    library = Library(path)
    device = torch.cuda.get_device_name()
    console = rich.console.Console()
    table = rich.table.Table("shape", "variant", title=f"{device}, torch {torch.__version__}")
    for column in ("ms", "TFLOP/s", "best peer / this"):
        table.add_column(column, justify="right")
    names = _SHAPE.value or list(SHAPES)
    records = []
    with rich.progress.Progress(console=console) as progress:
        task = progress.add_task("shapes", total=len(names) * (_WARM_UPS + _ITERATIONS.value))
        for name in names:
            shape = SHAPES[name]
            result = measure(shape, library, _ITERATIONS.value, lambda: progress.advance(task))
            records.append({"shape": name, **dataclasses.asdict(shape), **result})
            for variant, ms in result["ms"].items():
                rate, ratio = shape.flops / ms / 1e9, result["best_peer_ms"] / ms
                table.add_row(name, variant, f"{ms:.4f}", f"{rate:.1f}", f"{ratio:.3f}")
            torch.cuda.empty_cache()
    console.print(table)
    if _JSON.value:
        document = {"device": device, "torch": torch.__version__, "shapes": records}
        pathlib.Path(outputs.output_path(_JSON.value)).write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    app.run(main)
