"""DDP and FSDP2 around the layer on two GPUs: as one EP group, and as two replicas.

Needs two GPUs of compute capability 9.0 that are linked: with fewer everything fails.
"""

import dataclasses

import torch

from examples.data_parallel import parallel, trainer
from examples.data_parallel.model import ModelConfig
from examples.data_parallel.trainer import STRATEGIES, Settings
from examples.train_lm import ranks
from mok_torch.reference import relative_error

RANKS = 2
MODEL = ModelConfig(
    hidden=512, layers=4, intermediate=256, shared_intermediate=256, precision="bf16"
)
BASE = Settings(
    "",
    1,
    model=MODEL,
    tokens=2048,
    microbatches=2,
    checkpointing=True,
    steps=10,
    learning_rate=1e-3,
    device="cuda",
    timeout_seconds=15.0,
)


def run_all(rank, folder):
    for ep_size in (1, 2):
        for strategy in STRATEGIES:
            settings = dataclasses.replace(BASE, strategy=strategy, ep_size=ep_size)
            results = [trainer.train(rank, settings) for _ in range(2)]
            assert results[0].losses == results[1].losses, (strategy, ep_size)
            assert results[0].digest == results[1].digest, (strategy, ep_size)
            path = f"{folder}/{strategy}.{ep_size}.{rank}.pt"
            torch.save(dataclasses.asdict(results[0]), path)


def test_strategies_agree_and_repeat(tmp_path, monkeypatch):
    assert torch.cuda.device_count() >= RANKS, "this test needs two GPUs"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    parallel.launch_kernels_in_order()
    ranks.launch(run_all, RANKS, str(tmp_path), device="cuda")
    # Two replicas hold all experts each.
    expected = torch.load(tmp_path / "ddp.1.0.pt")
    assert expected["losses"][-1] < expected["losses"][0]
    for ep_size in (1, 2):
        for strategy in STRATEGIES:
            for rank in range(RANKS):
                result = torch.load(tmp_path / f"{strategy}.{ep_size}.{rank}.pt")
                for name, gradient in result["gradients"].items():
                    whole = expected["gradients"][name]
                    if ".experts." in name and ep_size == RANKS:
                        whole = whole.chunk(RANKS)[rank]
                    # Sums over replicas of gradients that bf16 has rounded.
                    error = relative_error(gradient, whole)
                    assert error < 1e-2, f"{strategy}, EP {ep_size}, rank {rank}, {name}: {error}"
