"""Four processes, two replicas of two EP ranks: the gradients of one process, and the same bits."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from torch.distributed.tensor import DTensor

from examples.data_parallel import data_parallel, parallel, trainer
from examples.data_parallel.model import Model, ModelConfig, task
from examples.data_parallel.trainer import STRATEGIES, Settings
from examples.train_lm import ranks
from examples.train_lm.torchrun_test_support import run_two_ranks
from mok_torch.reference import relative_error

RANKS, EP_SIZE, TOKENS = 4, 2, 24
BASE = Settings("", EP_SIZE, tokens=TOKENS, steps=3)
VARIANTS = {
    "plain": {},
    "microbatches": {"microbatches": 3},
    "checkpointing": {"checkpointing": True, "microbatches": 2},
}


def run_variants(rank, folder, strategy):
    """Every variant of a strategy, the first one twice."""
    for name, changes in [*VARIANTS.items(), ("again", {})]:
        settings = dataclasses.replace(BASE, strategy=strategy, **changes)
        result = trainer.train(rank, settings)
        torch.save(dataclasses.asdict(result), f"{folder}/{name}.{rank}.pt")
    check_shards(strategy)


def check_shards(strategy: str):
    """What a rank holds."""
    meshes = parallel.make_meshes("cpu", EP_SIZE)
    model = Model(ModelConfig(), meshes.expert_group)
    trainer.wrap(model, meshes, strategy)
    moe = model.blocks[0].moe
    experts, router = moe.experts.w_gate, moe.router.weight
    own = ModelConfig.experts // EP_SIZE
    if strategy == "fsdp_experts":
        assert experts.to_local().shape[0] == own // (RANKS // EP_SIZE)
    else:
        assert not isinstance(experts, DTensor) and experts.shape[0] == own
    if strategy == "ddp":
        assert not isinstance(router, DTensor)
    else:
        assert router.to_local().shape[0] == ModelConfig.experts // RANKS
    with pytest.raises(ValueError, match="ep_size: expected a divisor of 4 ranks, got 3"):
        parallel.make_meshes("cpu", 3)


def gradients_of_one_process() -> dict[str, torch.Tensor]:
    """Of the loss over the tokens of all ranks, from a model that holds everything."""
    torch.manual_seed(0)
    model = Model(ModelConfig())
    x, target = (part.flatten(0, 1) for part in task(RANKS, TOKENS, ModelConfig.hidden, 0))
    (model(x) - target).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_those_of_one_process(tmp_path, strategy):
    ranks.launch(run_variants, RANKS, str(tmp_path), strategy)
    expected = gradients_of_one_process()
    for variant in VARIANTS:
        for rank in range(RANKS):
            result = torch.load(tmp_path / f"{variant}.{rank}.pt")
            assert result["gradients"].keys() == expected.keys()
            for name, gradient in result["gradients"].items():
                whole = expected[name]
                if ".experts." in name:
                    whole = whole.chunk(EP_SIZE)[rank % EP_SIZE]
                assert relative_error(gradient, whole) < 2e-6, f"{variant}, rank {rank}, {name}"
            again = torch.load(tmp_path / f"{variant if variant != 'plain' else 'again'}.{rank}.pt")
            assert again["losses"] == result["losses"] and again["digest"] == result["digest"]
        # Replicas stay replicas.
        digests = [torch.load(tmp_path / f"{variant}.{r}.pt")["digest"] for r in range(RANKS)]
        if strategy == "ddp":
            assert digests[:EP_SIZE] == digests[EP_SIZE:]
    losses = torch.load(tmp_path / "plain.0.pt")["losses"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (["--ep_size=3"], "flag --ep_size=3: must be a divisor of the 4 ranks: 1, 2, 4"),
        (["--ranks=3"], "--ranks=3: --ep_size, now 2, must be a divisor of the 3 ranks: 1, 3"),
        (["--ranks=2", "--ep_size=4"], "flag --ep_size=4: must be a divisor of the 2 ranks"),
        (["--ranks=9", "--ep_size=9"], "flag --ep_size=9: 9 is not an integer in the range [1, 8]"),
        (["--microbatches=65"], "flag --microbatches=65: 65 is not an integer in the range"),
        (["stray"], "unexpected arguments: ['stray']"),
    ],
)
def test_wrong_flags_are_usage_errors(wrong, text):
    environment = os.environ | {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    command = [sys.executable, data_parallel.__file__, *wrong]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result
    assert text in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_program_under_torchrun(tmp_path):
    """Two ranks, without replicas."""
    result = run_two_ranks(data_parallel.__file__, tmp_path, "--steps=3", "--strategy=ddp")
    assert result.stdout.startswith("ddp: losses ") and result.stdout.count(",") == 2
