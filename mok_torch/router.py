"""Top-k routers: which experts a token visits, and with what weight.

Selection is a pure function of the logits and of the expert bias, ties included (the lowest
expert id wins), so recomputation under activation checkpointing selects the same experts. Logits
come from ops.router_logits, whose bits do not depend on the other tokens of the batch; together
they make a token's routes independent of the EP size.

Sources: softmax, Shazeer et al. 2017 (arXiv:1701.06538); group limits, DeepSeek-V2
(arXiv:2405.04434); sigmoid scores with a bias for balance, DeepSeek-V3 (arXiv:2412.19437) and
Wang et al. 2024 (arXiv:2408.15664).
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mok_torch import ops
from mok_torch.checks import require_dense, require_shape
from mok_torch.scalars import MAX_SIZE, as_choice, as_flag, as_integer, as_number

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")

# Keeps norm_topk_prob finite when every selected score underflowed to 0.
_NORM_EPSILON = 1e-20


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How scores become routes; checked on construction.

    Attributes:
      num_experts: E, the experts of all ranks.
      top_k: K, routes per token.
      scoring: "softmax" over the experts, or per expert "sigmoid" or "sqrtsoftplus"
        (the square root of log(1 + exp(logit))).
      norm_topk_prob: divide the K selected scores by their sum.
      routed_scaling_factor: multiplies the router weights last.
      n_group, topk_group: the experts form n_group equal groups of consecutive ids, and a token
        may visit those of its topk_group best groups only. A group's score is the sum of its two
        best biased scores, or, without expert bias, its best score.
      expert_bias: keep a bias per expert that is added to the scores for the selection only,
        never for the weights (balance without an auxiliary loss). None: unless scoring is softmax.
    """

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    expert_bias: bool | None = None

    def __post_init__(self):
        for name in ("num_experts", "top_k", "n_group", "topk_group"):
            object.__setattr__(self, name, as_integer(name, getattr(self, name), 1, MAX_SIZE))
        as_choice("scoring", self.scoring, SCORINGS)
        as_flag("norm_topk_prob", self.norm_topk_prob)
        if self.num_experts % self.n_group:
            raise ValueError(
                f"num_experts: expected a multiple of n_group = {self.n_group}, got "
                f"{self.num_experts}"
            )
        if self.topk_group > self.n_group:
            raise ValueError(
                f"topk_group: expected at most n_group = {self.n_group}, got {self.topk_group}"
            )
        eligible = self.topk_group * (self.num_experts // self.n_group)
        if self.top_k > eligible:
            raise ValueError(
                f"top_k: expected at most the {eligible} experts a token may visit "
                f"({self.topk_group} of {self.n_group} groups of {self.num_experts} experts), "
                f"got {self.top_k}"
            )
        factor = as_number("routed_scaling_factor", self.routed_scaling_factor)
        object.__setattr__(self, "routed_scaling_factor", factor)
        if as_flag("expert_bias", self.expert_bias, optional=True) is None:
            object.__setattr__(self, "expert_bias", self.scoring != "softmax")


def _require_config(config):
    if not isinstance(config, RouterConfig):
        raise TypeError(f"config: expected a RouterConfig, got {type(config).__name__}")


class Routes(NamedTuple):
    """A router's decision; the two tensors that functional.moe takes."""

    topk_idx: Tensor  # int64 [T, K], descending by selection score
    topk_weight: Tensor  # fp32 [T, K], differentiable


def position_independent_sigmoid(logits: Tensor) -> Tensor:
    """The sigmoid, fp32 to fp32, with the same bits wherever an element lies in the tensor.

    torch.sigmoid in fp32 is not: on a CPU the last elements of a thread's share take a scalar
    path whose last bit differs from the vector path's, and the shares depend on the token count.
    A difference in float64's last bit does not survive the rounding.
    """
    return torch.sigmoid(logits.double()).float()


def router_scores(logits: Tensor, scoring: str) -> Tensor:
    """Scores [T, E] of fp32 logits [T, E]; see RouterConfig.scoring."""
    if scoring == "softmax":
        return torch.softmax(logits, dim=-1)
    if scoring == "sigmoid":
        return position_independent_sigmoid(logits)
    # Through float64 for the reason above.
    return torch.sqrt(F.softplus(logits.double())).float()


def topk_lowest_id_first(scores: Tensor, k: int) -> Tensor:
    """Ids int64 [..., k] of the k largest of fp32 scores [..., E], descending.

    Equal scores rank by ascending id, whatever torch.topk does with ties on this device: it sees
    distinct integers, the score in the high bits and the reversed id in the low ones. NaN ranks as
    +inf, so a poisoned score is selected and stays visible.
    """
    scores = torch.nan_to_num(scores.float(), nan=math.inf, posinf=math.inf, neginf=-math.inf)
    bits = scores.view(torch.int32)
    # IEEE order as signed integers: negative floats have their magnitude bits flipped. The only
    # equal values with different bits are the two zeros, and no score is -0: they are >= +0, and
    # +0 plus a bias of -0 is +0.
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    num_ids = scores.shape[-1]
    reversed_id = torch.arange(num_ids - 1, -1, -1, device=scores.device)
    return torch.topk(ordered * num_ids + reversed_id, k, dim=-1).indices


def _limit_to_best_groups(selection: Tensor, config: RouterConfig) -> Tensor:
    """Selection scores [T, E], -inf for experts outside the token's topk_group best groups."""
    grouped = selection.unflatten(-1, (config.n_group, -1))
    best = min(2, grouped.shape[-1]) if config.expert_bias else 1
    group_scores = grouped.topk(best, dim=-1).values.sum(dim=-1)
    groups = topk_lowest_id_first(group_scores, config.topk_group)
    allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, groups, True)
    return grouped.masked_fill(~allowed.unsqueeze(-1), -math.inf).flatten(-2)


def route(logits: Tensor, config: RouterConfig, expert_bias: Tensor | None = None) -> Routes:
    """Selects config.top_k experts for each row of logits.

    Args:
      logits: fp32 [T, E].
      config: num_experts must equal E.
      expert_bias: fp32 [E]; required exactly when config.expert_bias.

    Raises:
      ValueError, TypeError: logits or expert_bias do not fit config.
    """
    _require_config(config)
    require_dense("logits", logits)
    if logits.dim() != 2 or logits.shape[-1] != config.num_experts:
        raise ValueError(
            f"logits: expected shape [T, {config.num_experts}], got {list(logits.shape)}"
        )
    if logits.dtype != torch.float32:
        raise TypeError(f"logits: expected torch.float32, got {logits.dtype}")
    if (expert_bias is not None) != config.expert_bias:
        raise ValueError(
            f"expert_bias: expected {'a tensor' if config.expert_bias else 'None'} when "
            f"config.expert_bias is {config.expert_bias}, got "
            f"{type(expert_bias).__name__}"
        )
    if expert_bias is not None and expert_bias.shape != (config.num_experts,):
        raise ValueError(
            f"expert_bias: expected shape [{config.num_experts}], got {list(expert_bias.shape)}"
        )
    scores = router_scores(logits, config.scoring)
    # Selection has no gradient; only the weights of the selected experts have one.
    selection = scores.detach()
    if expert_bias is not None:
        selection = selection + expert_bias
    if config.n_group > 1:
        selection = _limit_to_best_groups(selection, config)
    topk_idx = topk_lowest_id_first(selection, config.top_k)
    topk_weight = scores.gather(-1, topk_idx)
    if config.norm_topk_prob:
        topk_weight = topk_weight / (topk_weight.sum(dim=-1, keepdim=True) + _NORM_EPSILON)
    return Routes(topk_idx, topk_weight * config.routed_scaling_factor)


def count_routes(topk_idx: Tensor, num_experts: int) -> Tensor:
    """Routes per expert, int64 [num_experts]; -1 counts nowhere."""
    flat = topk_idx.flatten()
    # Integer addition: the order in which scatter_add adds does not matter.
    load = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return load.scatter_add(0, flat.clamp(min=0), (flat >= 0).long())


class Router(nn.Module):
    """A linear layer to fp32 logits, then route().

    Attributes:
      weight: parameter [E, H].
      expert_bias: fp32 buffer [E], or None without config.expert_bias. It has no gradient:
        update_expert_bias moves it, after the optimizer step and never between a forward and its
        recomputation.
    """

    def __init__(
        self,
        hidden_size: int,
        config: RouterConfig,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        _require_config(config)
        self.config = config
        hidden_size = as_integer("hidden_size", hidden_size, 1, MAX_SIZE)
        # fp32 unless asked otherwise: close scores should not be decided by rounded weights.
        dtype = torch.float32 if dtype is None else dtype
        shape = (config.num_experts, hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        bias = None
        if config.expert_bias:
            bias = torch.zeros(config.num_experts, dtype=torch.float32, device=device)
        self.register_buffer("expert_bias", bias)

    def forward(self, x: Tensor) -> Routes:
        """Routes of tokens x [T, H]."""
        return self.route(ops.router_logits(x, self.weight))

    def route(self, logits: Tensor) -> Routes:
        """Routes of tokens whose fp32 logits [T, E] are known.

        Raises:
          ValueError: the expert bias is not finite (on a GPU nobody waits to look).
        """
        bias = self.expert_bias
        on_cpu = bias is not None and bias.device.type == "cpu"
        if on_cpu and not torch.compiler.is_compiling() and not bool(bias.isfinite().all()):
            raise ValueError(f"router.expert_bias: expected finite numbers, got {bias.tolist()}")
        return route(logits, self.config, bias)

    @torch.no_grad()
    def update_expert_bias(self, load: Tensor, rate: float = 1e-3) -> None:
        """Raises the bias of experts below the mean load by rate, and lowers it above.

        Args:
          load: routes per expert [E], summed over all ranks (count_routes, all-reduced): every
            rank must apply the same numbers. Integers, or floating-point numbers.
          rate: the step, >= 0; DeepSeek-V3 uses 1e-3.

        Raises:
          RuntimeError: the router has no expert bias.
          TypeError: load or rate is of another kind.
          ValueError: load has another shape, or holds what is no number of routes (on a GPU
            nobody waits to look); rate is negative or not finite.
        """
        if self.expert_bias is None:
            raise RuntimeError("this router has no expert bias: set RouterConfig.expert_bias")
        rate = as_number("rate", rate, 0.0)
        require_dense("load", load)
        require_shape("load", load, self.expert_bias.shape, "[E]")
        if load.dtype == torch.bool or load.is_complex():
            raise TypeError(f"load: expected numbers of routes, got {load.dtype}")
        on_cpu = load.device.type == "cpu" and not torch.compiler.is_compiling()
        if on_cpu and not bool(((load >= 0) & load.isfinite()).all()):
            raise ValueError(f"load: expected finite numbers >= 0, got {load.tolist()}")
        load = load.to(device=self.expert_bias.device, dtype=torch.float64)
        self.expert_bias += rate * torch.sign(load.mean() - load).float()

    def _apply(self, fn, recurse: bool = True):
        """Module.to() and its like: the bias changes its device but stays fp32.

        In bf16 a bias near 1 could no longer move by 1e-3.
        """
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def extra_repr(self) -> str:
        return f"hidden_size={self.weight.shape[1]}, {self.config}"
