"""Times the whole layer on several GPUs: MoK against NCCL + PyTorch and what else is installed.

    torchrun --nproc-per-node=2 -m benchmarks.layer.layer --json=layer.json --plot=layer.png
    ./bazelw run //benchmarks/layer -- --backend=gloo --device=cpu --ranks=2 --model=tiny

Without torchrun it starts --ranks processes itself. measure.py has the protocol, README.md of
benchmarks the peers and how to read the table.
"""

import math
import os
import socket
import sys

import rich.console
import rich.progress
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from absl import app, flags

from benchmarks import outputs
from benchmarks.layer import report
from benchmarks.layer.cases import FAMILIES, MODELS, Case, make_case
from benchmarks.layer.catalogue import LAYERS, available_layers, make_layers, missing_package
from benchmarks.layer.check import check_layers, check_same_results
from benchmarks.layer.measure import Clock, Product, measure_layers, measure_rates
from benchmarks.layer.memory import measure_memory
from benchmarks.layer.problem import make_problem

_BACKEND = flags.DEFINE_enum("backend", "nccl", ["nccl", "gloo"], "Of the process group.")
_DEVICE = flags.DEFINE_enum("device", "cuda", ["cuda", "cpu"], "Where layers run.")
_RANKS = flags.DEFINE_integer(
    "ranks", None, "Processes to start; default: one a GPU.", lower_bound=1
)
_MODEL = flags.DEFINE_multi_enum("model", ["kimi", "glm", "qwen", "deepseek"], MODELS, "Models.")
_FAMILY = flags.DEFINE_multi_enum("family", list(FAMILIES), FAMILIES, "Families of cases.")
_LAYER = flags.DEFINE_multi_enum("layer", None, LAYERS, "Default: all that can run here.")
_TOKENS = flags.DEFINE_integer(
    "tokens", None, "Tokens per rank, instead of the family's.", lower_bound=1
)
_ITERATIONS = flags.DEFINE_integer("iterations", 30, "Timed iterations.", lower_bound=1)
_WARM_UPS = flags.DEFINE_integer("warm_ups", 6, "Iterations before.", lower_bound=0)
_SLEEP_MS = flags.DEFINE_float(
    "sleep_ms", 0.3, "Of the device before each pass; see measure.py.", 0.0, 1e4
)
flags.register_validator(_SLEEP_MS, math.isfinite, "must be finite")
_FORWARD_ONLY = flags.DEFINE_multi_enum(
    "forward_only", [], LAYERS, "Layers of which only the forward runs."
)
_CHECK = flags.DEFINE_bool("check", True, "Compare with float64 at a small size first.")
_JSON = outputs.define_json()
_PLOT = outputs.define_plot("the times over the floor")


def _environment(device: torch.device, product: Product) -> dict:
    environment = {"torch": torch.__version__, "ranks": dist.get_world_size()}
    environment["sleep_ms"] = _SLEEP_MS.value
    environment["product_size"] = product.size
    if device.type == "cuda":
        environment["device"] = torch.cuda.get_device_name(device)
        environment["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return environment


def _measure_case(
    case: Case, device: torch.device, product: Product, progress
) -> report.CaseResult:
    rates = measure_rates(device, product)
    problem = make_problem(case, device, _dtype(device))
    layers, forward_only = make_layers(problem, _LAYER.value, _FORWARD_ONLY.value)
    memory = measure_memory(layers, forward_only, problem)  # while the layers have not run
    check_same_results(layers, forward_only)
    iterations, warm_ups = _ITERATIONS.value, _WARM_UPS.value
    task = progress.add_task(case.name, total=iterations + warm_ups)
    clock = Clock(device, _SLEEP_MS.value)
    turns = [*layers, product]
    times = measure_layers(
        turns, forward_only, clock, iterations, warm_ups, lambda: progress.advance(task)
    )
    in_turns = times.pop(product.name)
    turn_rates = product.rates(in_turns.forward, in_turns.forward_backward)
    link_bytes = {layer.name: layer.link_bytes for layer in layers}
    return report.CaseResult(case, problem.load, rates, turn_rates, times, link_bytes, memory)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _run() -> None:
    """One rank, in a process group."""
    leads = dist.get_rank() == 0
    device = torch.device("cpu")
    if _DEVICE.value == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    console = rich.console.Console(quiet=not leads, width=None if sys.stdout.isatty() else 180)
    if _CHECK.value:
        errors = check_layers(device, _dtype(device), _LAYER.value, _FORWARD_ONLY.value)
        for name, error in errors.items():
            console.print(f"{name}: error against float64 at most {error:.1e}")
    results, product = [], Product(device)
    columns = rich.progress.Progress.get_default_columns()
    with rich.progress.Progress(*columns, console=console, transient=True) as progress:
        for model in _MODEL.value:
            for family in _FAMILY.value:
                case = make_case(model, family, _TOKENS.value)
                results.append(_measure_case(case, device, product, progress))
                report.print_result(results[-1], progress.console)
                if leads and _JSON.value:  # after each case: a run that is cut short leaves some
                    path = outputs.output_path(_JSON.value)
                    report.write_json(path, _environment(device, product), results)
    if leads and _PLOT.value:
        report.write_plot(outputs.output_path(_PLOT.value), results)


def _rank_main(rank: int, ranks: int, port: int, argv: list[str]) -> None:
    """A process of its own."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(argv)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    _join_and_run()


def _join_and_run() -> None:
    if _DEVICE.value == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group(_BACKEND.value)
    try:
        _run()
    finally:
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _require_a_gpu_each(ranks: int) -> None:
    """Raises UsageError if there are not as many GPUs as ranks on this host."""
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise app.UsageError("no GPU; --ranks=2 --backend=gloo --device=cpu runs on a CPU")
    if ranks > gpus:
        raise app.UsageError(f"{ranks} ranks on this host, each needs a GPU: it has {gpus}")


def _check_layers() -> None:
    """Raises UsageError if the flags name layers that cannot run here, or do not run."""
    chosen = _LAYER.value or available_layers(_DEVICE.value == "cuda")
    for name in chosen:
        if package := missing_package(name):
            raise app.UsageError(f"--layer={name}: package {package} is not installed")
    for name in _FORWARD_ONLY.value:
        if name not in chosen:
            raise app.UsageError(f"--forward_only={name}: expected one of {', '.join(chosen)}")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    _check_layers()
    if (_BACKEND.value == "nccl") != (_DEVICE.value == "cuda"):
        raise app.UsageError("--backend=nccl goes with --device=cuda, gloo with cpu")
    by_torchrun = "RANK" in os.environ
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if by_torchrun else _RANKS.value
    if _DEVICE.value == "cuda":
        ranks = ranks or torch.cuda.device_count()
        _require_a_gpu_each(ranks)
    elif ranks is None:
        raise app.UsageError("--device=cpu needs --ranks")
    if by_torchrun:
        return _join_and_run()
    multiprocessing.spawn(_rank_main, (ranks, _free_port(), sys.argv), nprocs=ranks)


if __name__ == "__main__":
    app.run(main)
