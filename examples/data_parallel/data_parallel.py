"""Trains a small MoE model with data parallelism around expert parallelism.

    ./bazelw run //examples/data_parallel -- --ranks=4 --ep_size=2 --strategy=fsdp_experts
    torchrun --nproc-per-node=2 -m examples.data_parallel.data_parallel --device=cuda --ep_size=2

parallel.py tells which parameter belongs to whom.
"""

import rich.console
import torch
from absl import app, flags

from examples.data_parallel import parallel
from examples.data_parallel.model import ModelConfig
from examples.data_parallel.trainer import STRATEGIES, Settings, train
from examples.train_lm import ranks

_STRATEGY = flags.DEFINE_enum("strategy", "fsdp_experts", STRATEGIES, "Who holds what.")
_RANKS = flags.DEFINE_integer("ranks", 4, "Processes to start; without torchrun.", lower_bound=1)
_EP_SIZE = flags.DEFINE_integer(
    "ep_size",
    2,
    "Ranks that share the experts; a divisor of --ranks.",
    lower_bound=1,
    upper_bound=ModelConfig.experts,
)
_STEPS = flags.DEFINE_integer("steps", 20, "Optimizer steps.", lower_bound=1)
_MICROBATCHES = flags.DEFINE_integer(
    "microbatches", 2, "Of a step.", lower_bound=1, upper_bound=Settings.tokens
)
_CHECKPOINTING = flags.DEFINE_bool("checkpointing", True, "Recompute each block's activations.")
_DEVICE = flags.DEFINE_enum("device", "cpu", ["cpu", "cuda"], "Where the ranks train.")


def check_device(device: str) -> bool:
    """Validator of --device. (Validators run when all flags have values.)"""
    if device == "cuda" and not torch.cuda.is_available():
        raise flags.ValidationError("PyTorch finds no GPU")
    count, gpus = ranks.num_ranks(_RANKS.value), torch.cuda.device_count()
    if device == "cuda" and count > gpus:
        raise flags.ValidationError(f"{count} ranks, but {gpus} GPUs")
    return True


def check_ep_size(ep_size: int) -> bool:
    """Validator of --ep_size; where that was not given, it names the number of ranks."""
    count = ranks.num_ranks(_RANKS.value)
    if count % ep_size == 0:
        return True
    divisors = [str(n) for n in range(1, ModelConfig.experts + 1) if count % n == 0]
    must = f"must be a divisor of the {count} ranks: {', '.join(divisors)}"
    if flags.FLAGS["ep_size"].using_default_value:
        raise flags.IllegalFlagValueError(
            f"{ranks.count_flag()}={count}: --ep_size, now {ep_size}, {must}"
        )
    raise flags.ValidationError(must)


def settings_of_flags() -> Settings:
    precision = "bf16" if _DEVICE.value == "cuda" else "fp32"
    return Settings(
        strategy=_STRATEGY.value,
        ep_size=_EP_SIZE.value,
        model=ModelConfig(precision=precision),
        microbatches=_MICROBATCHES.value,
        checkpointing=_CHECKPOINTING.value,
        steps=_STEPS.value,
        device=_DEVICE.value,
    )


def train_and_print(rank: int, settings: Settings) -> None:
    """On one rank; rank 0 prints."""
    result = train(rank, settings)
    if rank == 0:
        losses = ", ".join(f"{loss:.4f}" for loss in result.losses)
        rich.console.Console().print(f"{settings.strategy}: losses {losses}", highlight=False)


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected arguments: {arguments[1:]}")
    settings = settings_of_flags()
    if settings.device == "cuda":
        parallel.launch_kernels_in_order()
    if ranks.launched_by_torchrun():
        ranks.work_as_rank(train_and_print, settings, device=settings.device)
    else:
        ranks.launch(train_and_print, _RANKS.value, settings, device=settings.device)


if __name__ == "__main__":
    flags.register_validator("device", check_device)
    flags.register_validator("ep_size", check_ep_size)
    with ranks.interruptible("data_parallel"):
        app.run(main)
