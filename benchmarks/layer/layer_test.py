"""The harness and every layer that runs here, on two processes without a GPU."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
MODULE = ("-m", "benchmarks.layer.layer")
SMALL = (
    *("--backend=gloo", "--device=cpu"),
    *("--model=tiny", "--tokens=48", "--iterations=2", "--warm_ups=1"),
)


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    path = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | path | environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def run(*arguments: str, program: str | None = None) -> subprocess.CompletedProcess:
    return start(*(MODULE if program is None else ("-c", program)), *SMALL, *arguments)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_layer_is_right_and_measured(ranks, tmp_path):
    path = tmp_path / "layer.json"
    plot = tmp_path / "layer.png"
    arguments = ["--family=model-zipf", f"--ranks={ranks}", f"--json={path}", f"--plot={plot}"]
    if ranks > 1:
        arguments.append("--family=ep64")
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    document = json.loads(path.read_text())
    assert len(document["cases"]) == (2 if ranks > 1 else 1)
    assert document["environment"]["ranks"] == ranks
    assert document["environment"]["product_size"] == 256
    for case in document["cases"]:
        assert len(case["layers"]) >= 5 and "MoK" in case["layers"]
        assert "product" not in case["layers"]
        rates = ("burst", "sustained", "burst_in_turns", "sustained_in_turns")
        assert len({case[f"{rate}_teraflops"] for rate in rates}) == 4  # all measured, each itself
        for times in case["layers"].values():
            assert 0 < times["forward"] < times["forward_backward"]
    assert "MoK: error against float64 at most" in result.stdout
    assert plot.stat().st_size > 10_000


def test_single_layers_can_be_chosen_and_backwards_left_out():
    result = run("--family=model", "--ranks=2", "--layer=mok", "--forward_only=mok", "--nocheck")
    assert result.returncode == 0, result.stderr
    (line,) = (line for line in result.stdout.splitlines() if line.startswith(" MoK"))
    assert line.split()[-9:] == ["-"] * 9
    assert "all-gather" not in result.stdout


BROKEN = """
from absl import app
from benchmarks.layer import layer, shared_expert

def one_gradient_is_wrong(self):
    grads = right(self)
    grads["shared_up"] = grads["shared_gate"]
    return grads

right = shared_expert.SharedExpert.weight_grads
shared_expert.SharedExpert.weight_grads = one_gradient_is_wrong
# In this process: a spawned one would not have the mistake.
layer.multiprocessing.spawn = lambda main, arguments, nprocs: main(0, *arguments)
app.run(layer.main)
"""


def test_a_wrong_gradient_is_an_error():
    result = run("--family=model", "--ranks=1", program=BROKEN)
    assert result.returncode != 0
    assert "gradient of shared_up: relative error" in result.stderr


def test_backend_and_device_go_together():
    result = run("--device=cuda")
    assert result.returncode != 0 and "gloo with cpu" in result.stderr + result.stdout


@pytest.mark.parametrize(
    "arguments, environment, error",
    [
        ((), {}, "no GPU; --ranks=2 --backend=gloo --device=cpu runs on a CPU"),
        ((), {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "no GPU; "),
        (("--backend=gloo", "--device=cpu"), {}, "--device=cpu needs --ranks"),
        (("--ranks=0",), {}, "--ranks=0"),
        (("--device=cpu", "--layer=sonic_moe"), {}, "--layer=sonic_moe: package sonicmoe is not"),
        (("--layer=mok", "--forward_only=all_to_all_cublas"), {}, "expected one of mok"),
        (("--tokens=0",), {}, "--tokens=0"),
        (("--sleep_ms=nan",), {}, "must be finite"),
    ],
    ids=[
        *("alone", "by torchrun", "without ranks", "no ranks"),
        *("no package", "does not run", "no tokens", "no number"),
    ],
)
def test_without_a_gpu(arguments, environment, error):
    result = start(*MODULE, *arguments, CUDA_VISIBLE_DEVICES="", **environment)
    assert result.returncode == 1
    assert error in result.stderr + result.stdout
    assert "Traceback" not in result.stderr
