"""A small model with MoE layers, and a task to learn: what data parallelism is shown on."""

import dataclasses

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mok_torch import MoELayer
from mok_torch.functional import MoKConfig


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes; precision: of the MoE layers' matrix products, "bf16" on GPUs."""

    hidden: int = 32
    layers: int = 2
    experts: int = 8
    top_k: int = 2
    intermediate: int = 24
    shared_intermediate: int = 16
    precision: str = "fp32"


class Block(nn.Module):
    """A dense layer, then a MoE layer, both beside the residual stream."""

    def __init__(self, config: ModelConfig, group, engine: MoKConfig | None):
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden)
        self.dense = nn.Linear(config.hidden, config.hidden, bias=False)
        self.moe = MoELayer(
            config.hidden,
            config.intermediate,
            config.experts,
            config.top_k,
            scoring="sigmoid",  # has a bias for balance: see parallel.balance_experts
            shared_intermediate_size=config.shared_intermediate,
            precision=config.precision,
            group=group,
            config=engine,
        )
        self.checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        if self.checkpointing and torch.is_grad_enabled():
            # The recomputation runs the MoE layer's forward again, exchange included: every rank
            # of the layer's group has to checkpoint, or none.
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        x = x + self.dense(self.norm(x))
        return x + self.moe(x)


class Model(nn.Module):
    """Blocks in a row.

    Args:
      config: the sizes.
      group: the ranks that share the experts, or None.
      engine: how the MoE layers run.
    """

    def __init__(self, config: ModelConfig, group=None, engine: MoKConfig | None = None):
        super().__init__()
        self.blocks = nn.ModuleList(Block(config, group, engine) for _ in range(config.layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def expert_parameters(self) -> list[nn.Parameter]:
        """Parameters of which the ranks of a group hold different experts' part."""
        return [p for block in self.blocks for p in block.moe.expert_parameters()]


def task(num_ranks: int, tokens: int, hidden: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all ranks, [ranks, tokens, hidden] each: a fixed random map."""
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(99))
    x = torch.randn(num_ranks, tokens, hidden, generator=generator)
    return x, torch.tanh(x @ teacher * hidden**-0.5)
