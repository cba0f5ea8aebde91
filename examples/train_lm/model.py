"""A small decoder-only transformer in the style of DeepSeek-V3: attention, then a MoE layer.

The model trains to the same bits on 1, 2 and 4 ranks. MoELayer sees to it that the experts do; the
rest of the model has to do its part. It runs groups of sequences of one size, because a BLAS picks
its algorithm by the shape: with one shape for every call, a group has the same bits wherever it is
computed. And the groups' gradients are added in a tree that no split of the batch changes
(mok_torch.fan_out). A group is one sequence on CPUs; on GPUs it is larger, to fill them.
"""

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mok_torch import MoELayer
from mok_torch.fan_out import fan_out


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; enough, with the weights, to load a checkpoint."""

    vocabulary: int = 256  # a token is a byte
    context: int = 256
    hidden: int = 192
    layers: int = 4
    heads: int = 3
    experts: int = 16
    top_k: int = 2
    expert_intermediate: int = 192
    shared_intermediate: int = 256
    precision: str = "bf16"  # of the MoE layers' matrix products
    dense_precision: str = "fp32"  # of the other matrix products; "bf16": under autocast
    sequences_at_once: int = 1  # the size of a group; bits depend on it


# What --size names.
SIZES = {
    "small": ModelConfig(),
    "medium": ModelConfig(
        hidden=512,
        heads=8,
        experts=32,
        top_k=4,
        expert_intermediate=256,
        shared_intermediate=256,
        dense_precision="bf16",
        sequences_at_once=8,
    ),
}


def in_groups(module: nn.Module, size: int, *batches: Tensor) -> Tensor:
    """module(*batches), applied to `size` sequences at a time.

    Each group uses a copy of its own of every parameter; fan_out adds up their gradients.
    """
    groups = list(zip(*(batch.split(size) for batch in batches), strict=True))
    names, parameters = zip(*module.named_parameters(), strict=True)
    copies = zip(*(fan_out(parameter, len(groups)) for parameter in parameters), strict=True)
    outputs = [
        torch.func.functional_call(module, dict(zip(names, own, strict=True)), group)
        for own, group in zip(copies, groups, strict=True)
    ]
    return torch.cat(outputs)


def rotary_table(context: int, dimension: int) -> Tensor:
    """Complex exp(i * position * frequency), [context, dimension / 2] (arXiv:2104.09864)."""
    frequency = 10_000.0 ** (-torch.arange(0, dimension, 2) / dimension)
    angle = torch.outer(torch.arange(context), frequency)
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotary position embedding of x [..., S, D], in fp32 whatever x is."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * table[: x.shape[-2]]).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """x + causal self-attention of norm(x), over each sequence."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = config.heads
        self.norm = nn.RMSNorm(config.hidden)
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)
        rotary = rotary_table(config.context, config.hidden // config.heads)
        self.register_buffer("rotary", rotary, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [N, S, H] -> [N, S, H]."""
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # each [N, heads, S, D]
        q, k = rotate(q, self.rotary), rotate(k, self.rotary)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention, then x + experts(norm(x))."""

    def __init__(self, config: ModelConfig, group=None, engine=None):
        super().__init__()
        self.at_once = config.sequences_at_once
        self.attention = Attention(config)
        self.norm = nn.RMSNorm(config.hidden)
        self.moe = MoELayer(
            config.hidden,
            config.expert_intermediate,
            config.experts,
            config.top_k,
            scoring="sigmoid",  # balanced by a bias, without an auxiliary loss
            shared_intermediate_size=config.shared_intermediate,
            precision=config.precision,
            gradient_block=config.sequences_at_once * config.context,
            group=group,
            config=engine,
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, H] -> [B, S, H]."""
        x = in_groups(self.attention, self.at_once, x)
        return x + self.moe(in_groups(self.norm, self.at_once, x))


class Head(nn.Module):
    """The loss of every prediction."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden)
        self.logits = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """x [N, S, H], target int64 [N, S] -> nats [N, S]."""
        logits = self.logits(self.norm(x)).float().flatten(0, 1)
        return F.cross_entropy(logits, target.flatten(), reduction="none").view(target.shape)


class LanguageModel(nn.Module):
    """Next-byte prediction.

    Args:
      config: the sizes.
      group: the ranks that share the experts (torch.distributed), or None for this process alone.
      engine: a MoKConfig, how the MoE layers run on this machine.
    """

    def __init__(self, config: ModelConfig, group=None, engine=None):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.blocks = nn.ModuleList(Block(config, group, engine) for _ in range(config.layers))
        self.head = Head(config)
        self._reset_parameters()

    def _reset_parameters(self):
        nn.init.normal_(self.embedding.weight, std=0.5)
        nn.init.normal_(self.head.logits.weight, std=0.02)  # starts near the uniform guess
        for block in self.blocks:
            # Residual branches start small: their sum over the layers stays near 1.
            block.attention.out.weight.data.mul_(0.5 / self.config.layers**0.5)

    @property
    def moe_layers(self) -> list[MoELayer]:
        return [block.moe for block in self.blocks]

    def expert_parameters(self) -> list[nn.Parameter]:
        """Parameters of which each rank holds its own experts' part."""
        return [p for layer in self.moe_layers for p in layer.expert_parameters()]

    def replicated_parameters(self) -> list[nn.Parameter]:
        """Parameters that every rank holds; their gradients have to be summed over the ranks."""
        sharded = set(self.expert_parameters())
        return [p for p in self.parameters() if p not in sharded]

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """tokens [B, S] -> [B, S, H]."""
        with self._dense_precision(tokens.device):
            x = in_groups(self.embedding, self.config.sequences_at_once, tokens)
            for block in self.blocks:
                x = block(x)
            return x

    def _dense_precision(self, device: torch.device) -> torch.autocast:
        """Where the dense layers' products are bf16. The MoE layers have a precision of their own,
        and the sums along the residual stream stay fp32."""
        enabled = self.config.dense_precision == "bf16"
        return torch.autocast(device.type, torch.bfloat16, enabled=enabled)

    def forward(self, tokens: Tensor) -> Tensor:
        """Loss of every prediction in nats: tokens [B, S + 1] -> [B, S]."""
        hidden_states = self.hidden_states(tokens[:, :-1])
        with self._dense_precision(tokens.device):
            at_once = self.config.sequences_at_once
            return in_groups(self.head, at_once, hidden_states, tokens[:, 1:])

    @torch.no_grad()
    def generate(self, prompt: Tensor, length: int, generator: torch.Generator) -> Tensor:
        """prompt int64 [S] and length more tokens, drawn from the model at temperature 0.8.

        generator: of the CPU.
        """
        tokens = prompt
        for _ in range(length):
            window = tokens[-self.config.context :]
            last = self.hidden_states(window[None])[0, -1]
            logits = self.head.logits(self.head.norm(last))
            probability = torch.softmax(logits / 0.8, dim=-1).cpu()
            drawn = torch.multinomial(probability, 1, generator=generator)
            tokens = torch.cat([tokens, drawn.to(tokens.device)])
        return tokens
