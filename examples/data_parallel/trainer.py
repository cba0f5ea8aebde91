"""Training as each rank runs it, under any of the strategies."""

import contextlib
import dataclasses
import hashlib

import torch
import torch.distributed as dist
from torch import Tensor

from examples.data_parallel import parallel
from examples.data_parallel.model import Model, ModelConfig, task
from examples.train_lm import gpu
from mok_torch.functional import MoKConfig

STRATEGIES = ("ddp", "fsdp", "fsdp_experts")
_BIAS_RATE = 1e-3


@dataclasses.dataclass(frozen=True)
class Settings:
    """What every rank is told.

    Attributes:
      strategy: one of STRATEGIES.
      ep_size: ranks that share the experts.
      tokens: of a rank in a step, cut into microbatches of equal size.
    """

    strategy: str
    ep_size: int
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    tokens: int = 64
    microbatches: int = 1
    checkpointing: bool = False
    steps: int = 20
    learning_rate: float = 1e-2
    device: str = "cpu"
    timeout_seconds: float = 60.0


@dataclasses.dataclass
class Result:
    """Of one rank.

    Attributes:
      losses: of each step, over the tokens of all ranks.
      gradients: of the first step, by parameter name; of the experts this rank's.
      digest: SHA-256 of this rank's parameters at the end.
    """

    losses: list[float]
    gradients: dict[str, Tensor]
    digest: str


def wrap(model: Model, meshes: parallel.Meshes, strategy: str) -> parallel.Strategy:
    """The model under a strategy of STRATEGIES."""
    if strategy == "ddp":
        return parallel.Replicated(model, meshes)
    return parallel.Sharded(model, meshes, shard_experts=strategy == "fsdp_experts")


def backward(strategy: parallel.Strategy, x: Tensor, target: Tensor, microbatches: int) -> Tensor:
    """Adds up the gradients of this rank's tokens [T, H]; returns its part of the loss. Collective.

    The loss is the mean over the tokens of all ranks: a sum over this rank's, divided by their
    number everywhere. It is divided before the backward, in each microbatch alike.
    """
    all_tokens = x.shape[0] * dist.get_world_size()
    total = x.new_zeros(())
    pieces = list(zip(x.chunk(microbatches), target.chunk(microbatches), strict=True))
    for index, (some_x, some_target) in enumerate(pieces):
        with strategy.microbatch(is_last=index + 1 == len(pieces)):
            error = strategy.module(some_x) - some_target
            loss = error.square().mean(dim=1).sum() / all_tokens
            loss.backward()
        total += loss.detach()
    strategy.finish()
    return total


def make_optimizer(model: Model, learning_rate: float) -> torch.optim.AdamW:
    """After wrapping: FSDP puts its own parameters in the place of the model's.

    Experts form a group of their own: an operation over many parameters at once (foreach) takes no
    mixture of plain tensors and shards, nor of shards over different ranks.
    """
    experts = model.expert_parameters()
    others = [p for p in model.parameters() if all(p is not expert for expert in experts)]
    groups = [{"params": others}, {"params": experts}]
    return torch.optim.AdamW(groups, lr=learning_rate, foreach=True)


def train(rank: int, settings: Settings, folder: str | None = None) -> Result:
    """Trains on one rank; with a folder, saves the Result there as <rank>.pt."""
    device = torch.device(settings.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        gpu.repeat_bit_for_bit()
    torch.set_num_threads(1)
    meshes = parallel.make_meshes(device.type, settings.ep_size)
    torch.manual_seed(0)
    engine = MoKConfig(num_threads=1, timeout_seconds=settings.timeout_seconds)
    model = Model(settings.model, meshes.expert_group, engine).to(device)
    for block in model.blocks:
        block.checkpointing = settings.checkpointing
    strategy = wrap(model, meshes, settings.strategy)
    optimizer = make_optimizer(model, settings.learning_rate)

    losses, gradients = [], {}
    for step in range(settings.steps):
        x, target = task(dist.get_world_size(), settings.tokens, settings.model.hidden, step)
        x, target = x[rank].to(device), target[rank].to(device)
        loss = backward(strategy, x, target, settings.microbatches)
        if step == 0:
            whole = parallel.full_gradients(model)
            gradients = {name: tensor.cpu().clone() for name, tensor in whole.items()}
        optimizer.step()
        optimizer.zero_grad()
        parallel.balance_experts(model, meshes, _BIAS_RATE)
        dist.all_reduce(loss, group=meshes.line.get_group())
        losses.append(float(loss))
    result = Result(losses, gradients, _digest(model))
    if folder is not None:
        torch.save(dataclasses.asdict(result), f"{folder}/{rank}.pt")
    return result


def _digest(model: Model) -> str:
    """Of this rank's parameters, or of its shards of them."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.detach()
        if isinstance(local, torch.distributed.tensor.DTensor):
            local = local.to_local()
        with contextlib.suppress(RuntimeError):  # an empty shard has no bytes to view
            digest.update(local.cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
