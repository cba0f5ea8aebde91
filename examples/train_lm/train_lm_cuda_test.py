"""The example's promises on GPUs: 500 steps repeat bit for bit, on two GPUs as on one.

Needs two GPUs of compute capability 9.0 that are linked: with fewer everything fails.
"""

import dataclasses
import statistics
import time

import pytest
import torch

from examples.train_lm import ranks
from examples.train_lm.model import SIZES
from examples.train_lm.trainer import Settings, train

STEPS = 500
SETTINGS = Settings(
    model=SIZES["medium"],
    ranks=1,
    steps=STEPS,
    batch=32,
    seed=0,
    learning_rate=2e-3,
    loss_log=None,
    checkpoint="",
    device="cuda",
    cuda_graph=True,
)


def run(folder, num_gpus: int, **changes) -> dict:
    """The checkpoint of a training in processes of its own; "seconds": all that it took."""
    assert torch.cuda.device_count() >= num_gpus, f"this test needs {num_gpus} GPUs"
    settings = dataclasses.replace(
        SETTINGS, ranks=num_gpus, checkpoint=str(folder / "model.pt"), **changes
    )
    begin = time.perf_counter()
    ranks.launch(train, num_gpus, settings, device="cuda")
    return torch.load(settings.checkpoint) | {"seconds": time.perf_counter() - begin}


def losses(checkpoint: dict) -> list[float]:
    return [record["loss"] for record in checkpoint["history"]]


def describe(name: str, checkpoint: dict) -> str:
    rate = statistics.median(record["tokens_per_s"] for record in checkpoint["history"])
    return (
        f"{name}: {rate:.0f} tokens/s, last loss {losses(checkpoint)[-1]:.6f}, validation "
        f"{checkpoint['validation_loss']:.6f}, weights {checkpoint['digest'][:16]}, "
        f"{checkpoint['seconds']:.1f} s"
    )


def test_500_steps_on_two_gpus_repeat_and_equal_one_gpu(tmp_path, capsys):
    first, second = (run(tmp_path, 2) for _ in range(2))
    alone = run(tmp_path, 1)
    with capsys.disabled():
        print()
        for name, checkpoint in (("2 GPUs", first), ("2 GPUs", second), ("1 GPU", alone)):
            print(describe(name, checkpoint))
        differing = sum(a != b for a, b in zip(losses(alone), losses(first), strict=True))
        print(f"steps whose loss on 1 GPU has other bits than on 2: {differing} of {STEPS}")
    assert len(losses(first)) == STEPS
    assert losses(second) == losses(first)
    assert second["digest"] == first["digest"]
    # What DESIGN asks for; that not even a bit differs is the example's own promise.
    assert losses(alone) == pytest.approx(losses(first), rel=5e-3)
    assert alone["validation_loss"] == pytest.approx(first["validation_loss"], rel=5e-3)
    assert losses(alone) == losses(first) and alone["digest"] == first["digest"]
    assert losses(first)[-1] < 0.5 * losses(first)[0]


def test_a_graph_of_the_step_changes_no_bit(tmp_path):
    graphed = run(tmp_path, 1, steps=8)
    eager = run(tmp_path, 1, steps=8, cuda_graph=False)
    assert losses(eager) == losses(graphed) and eager["digest"] == graphed["digest"]
