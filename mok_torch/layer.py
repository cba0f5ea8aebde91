"""MoELayer: router, routed experts and shared expert as one torch.nn.Module."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from mok_torch import _C, full_state, functional, ops
from mok_torch.checks import (
    as_device,
    check_swiglu_limit,
    refuse_tracing,
    require_input,
)
from mok_torch.config import MoKConfig
from mok_torch.dtypes import as_dtype
from mok_torch.experts import Experts, SharedExpert, cast, draw, expert_range, output_gate
from mok_torch.fan_out import fan_out
from mok_torch.groups import (
    ONE_RANK,
    DistributedGroup,
    SingleRank,
    as_group,
    raising_on_every_rank,
    warn_of_no_group,
)
from mok_torch.router import (
    Router,
    RouterConfig,
    Routes,
    count_routes,
)
from mok_torch.scalars import MAX_SIZE, as_choice, as_flag, as_integer, as_number
from mok_torch.workspace import Workspace, get_workspace, workspace_of_layer

if torch.distributed.is_available():
    # PyTorch imports this at the first call of an operator. Were there a process group by then, its
    # functions would hold it as their default argument for ever, and gloo's threads would live on
    # into the end of the interpreter, where they may abort.
    import torch.distributed.nn

# What the experts' matrix products read and write; sums are float32 in all of them.
PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}


class MoELayer(nn.Module):
    """A mixture-of-experts layer whose experts are spread over the ranks of a group.

    Every rank calls the layer with its own tokens, any number of them, and gets their outputs. The
    bits of a token's output, and of every gradient below, do not depend on how many ranks share the
    work, on the number of threads or on the other settings of MoKConfig.

    Gradients: those of the routed experts (`expert_parameters`) are complete, summed over the
    tokens of all ranks. The router and the shared expert are replicated
    (`replicated_parameters`): each rank gets the sum over its own tokens, to be all-reduced with
    SUM like those of any data-parallel parameter. Divide the loss by the global number of tokens
    and both are gradients of the mean.

    The state dict has the same names on every rank; only the leading dimension of `experts.*` is
    this rank's share. `full_state_dict` gathers it, `load_full_state_dict` takes the share out.
    copy.deepcopy makes a layer of the same rank and group. Its parameters are copied as PyTorch
    copies them: without gradients, hooks, and what a trainer has attached to them (main_grad). Only
    a layer without a group can be pickled, or saved whole with torch.save; there PyTorch keeps
    main_grad, with all of the buffer that it is a part of.

    Every rank gives the same arguments, but for group, config, max_tokens_per_rank and which GPU
    the device is. That is compared where ranks meet to make room for tokens (reserve, the
    constructor with max_tokens_per_rank, else the first forward): ranks that differ all raise
    ValueError there, with the argument's name and each rank's value.

    Args:
      hidden_size, intermediate_size: H and I, multiples of 8.
      num_experts: E, over all ranks; rank 0 owns the first ones, and so on (expert_range).
      top_k: routes per token.
      scoring, norm_topk_prob, routed_scaling_factor, n_group, topk_group, expert_bias: see
        RouterConfig.
      shared_intermediate_size: I_s of the shared expert, a multiple of 8; 0: there is none.
      shared_gate: multiply the shared expert's output by sigmoid(gate_weight x).
      swiglu_limit: clamp of the experts' gate and up projections; None: none.
      group: the ranks: a torch.distributed process group, or a member of InProcessGroup; left out
        or None: this one alone. (None warns where it is likely to be a mistake: torch.distributed's
        group.WORLD is None until init_process_group.)
      gradient_block: None: the router and the shared expert take all tokens at once. N: N tokens
        at a time, and their gradients are added in a tree over these blocks (fan_out.py): summed
        over the ranks with tree_sum they have the same bits for every EP size that splits the
        batch into equal powers of two of blocks. The shared expert then runs beside the routed
        ones instead of inside the same pass, so its term is rounded once more.
      gradient_accumulation_fusion: the backward adds the gradients of the routed and the shared
        experts to their parameters' main_grad, see functional.moe. Not with gradient_block.
      max_tokens_per_rank: reserve() this many; the constructor is then collective. None: the first
        forward reserves what the ranks pass in it. Without a group there is no limit.
      config: how the engine runs; None: MoKConfig().
      precision: "bf16" or "fp32", of the experts' matrix products; None: that of dtype.
      dtype: of the experts' parameters, torch.bfloat16 or torch.float32; the router's are fp32.
        None: PyTorch's default. fp32 parameters with precision="bf16" are rounded on each use.
      device: None: PyTorch's default.

    Attributes:
      expert_load: int64 buffer [E], routes per expert of the last forward on this rank. It is
        written, not added to, so recomputation under activation checkpointing counts nothing twice.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        scoring: str = "softmax",
        norm_topk_prob: bool = True,
        routed_scaling_factor: float = 1.0,
        n_group: int = 1,
        topk_group: int = 1,
        expert_bias: bool | None = None,
        shared_intermediate_size: int = 0,
        shared_gate: bool = False,
        swiglu_limit: float | None = None,
        group=ONE_RANK,
        gradient_block: int | None = None,
        gradient_accumulation_fusion: bool = False,
        max_tokens_per_rank: int | None = None,
        config: MoKConfig | None = None,
        precision: str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        if group is None:
            warn_of_no_group("MoELayer")
        self.group = as_group(group)
        self._workspace: Workspace | None = None
        is_collective = max_tokens_per_rank is not None
        # The other ranks then wait in reserve, whatever goes wrong here.
        with raising_on_every_rank(self.group, config, is_collective):
            router_config = RouterConfig(
                num_experts=num_experts,
                top_k=top_k,
                scoring=scoring,
                norm_topk_prob=norm_topk_prob,
                routed_scaling_factor=routed_scaling_factor,
                n_group=n_group,
                topk_group=topk_group,
                expert_bias=expert_bias,
            )
            hidden_size = _check_size("hidden_size", hidden_size, 8)
            intermediate_size = _check_size("intermediate_size", intermediate_size, 8)
            shared_intermediate_size = _check_size(
                "shared_intermediate_size", shared_intermediate_size, 0
            )
            if as_flag("shared_gate", shared_gate) and shared_intermediate_size == 0:
                raise ValueError("shared_gate needs a shared expert: shared_intermediate_size is 0")
            dtype = torch.get_default_dtype() if dtype is None else dtype
            as_dtype("dtype", dtype, PRECISIONS.values())
            device = as_device(device)
            self._set_options(
                swiglu_limit, config, precision, dtype, gradient_block, gradient_accumulation_fusion
            )
            factory = {"dtype": dtype, "device": device}
            self.router = Router(hidden_size, router_config, device=device)
            owned = self.owned_experts(self.group.rank)
            self.experts = Experts(hidden_size, intermediate_size, owned, **factory)
            self.shared_expert = None
            if shared_intermediate_size:
                self.shared_expert = SharedExpert(
                    hidden_size, shared_intermediate_size, shared_gate, **factory
                )
            load = torch.zeros(num_experts, dtype=torch.int64, device=device)
            self.register_buffer("expert_load", load, persistent=False)
            sizes = (hidden_size, intermediate_size, shared_intermediate_size)
            self._common_arguments = _common_arguments(self, sizes, shared_gate, dtype)
            self.reset_parameters()
        if is_collective:
            self.reserve(max_tokens_per_rank)

    def _set_options(
        self, swiglu_limit, config, precision, dtype, gradient_block, gradient_accumulation_fusion
    ) -> None:
        self.precision = _check_precision(precision, dtype)
        self.swiglu_limit = check_swiglu_limit(swiglu_limit) or None
        self.config = MoKConfig() if config is None else config
        if not isinstance(self.config, MoKConfig):
            raise TypeError(f"config: expected a MoKConfig, got {type(config).__name__}")
        self.gradient_block = as_integer(
            "gradient_block", gradient_block, 1, MAX_SIZE, optional=True
        )
        self.gradient_accumulation_fusion = as_flag(
            "gradient_accumulation_fusion", gradient_accumulation_fusion
        )
        if gradient_accumulation_fusion and self.gradient_block is not None:
            raise ValueError(
                f"gradient_block: expected None with gradient_accumulation_fusion, got "
                f"{self.gradient_block}"
            )

    @property
    def hidden_size(self) -> int:
        return self.router.weight.shape[1]

    @property
    def num_experts(self) -> int:
        return self.router.config.num_experts

    def owned_experts(self, rank: int) -> tuple[int, int]:
        """First expert and end of the experts that a rank of the group holds."""
        return expert_range(self.num_experts, self.group.size, rank)

    def reserve(self, max_tokens_per_rank: int) -> None:
        """Makes room for forwards with up to so many tokens on a rank; the ranks' maximum counts.

        Collective. Layers of the same group and shapes share what is reserved. Call it before the
        first forward when ranks pass more tokens later than at first (a forward with too many
        raises ValueError), and before torch.compile, which cannot trace it. Forwards of one rank
        make room themselves, but not while a CUDA graph is captured. After a RankTimeoutError it
        makes anew what that has left unusable, on one rank too.
        """
        with raising_on_every_rank(self.group, self.config):
            tokens = as_integer("max_tokens_per_rank", max_tokens_per_rank, 0, MAX_SIZE)
            self._reserve_alone(tokens)
        if self.group.size == 1:
            return
        # Held weakly by self.group: a layer must not keep a process group from being destroyed.
        group = self.group.group if isinstance(self.group, DistributedGroup) else self.group
        shapes = (self.hidden_size, self.router.config.top_k, PRECISIONS[self.precision])
        device = self.router.weight.device
        self._workspace = workspace_of_layer(
            self._common_arguments, self.config, group, device, tokens, shapes
        )

    def _reserve_alone(self, tokens: int) -> None:
        """As reserve, in the cached workspaces in which this layer meets no other rank."""
        device, needed = self.router.weight.device, {}
        if self.group.size == 1:
            needed[self.router.config.top_k] = tokens
        if self.shared_expert is not None and self.gradient_block is not None:
            needed[1] = max(needed.get(1, 0), min(tokens, self.gradient_block))
        if device.type == "meta":  # what is to run elsewhere
            return
        shapes = {"hidden_size": self.hidden_size, "dtype": PRECISIONS[self.precision]}
        for topk, room in needed.items():
            get_workspace(self.config, device=device, num_local_tokens=room, topk=topk, **shapes)

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02) -> None:
        """Draws all weights from a normal distribution and zeroes the expert bias.

        Each expert has a random sequence of its own, seeded from PyTorch's default CPU generator:
        ranks that were seeded alike hold the same full layer, for every EP size.
        """
        std = as_number("std", std, 0.0)
        seed = int(torch.randint(2**62, (), device="cpu"))
        for name, parameter in self.named_parameters():
            if not name.startswith("experts."):
                draw(parameter, std, seed, name)
        for name, parameter in self.experts.named_parameters():
            for expert, weight in enumerate(parameter, start=self.experts.first):
                draw(weight, std, seed, name, expert)
        if self.router.expert_bias is not None:
            self.router.expert_bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of tokens x [..., H], bf16 or fp32, in x's shape and dtype. Collective."""
        if torch.compiler.is_compiling():
            arguments, beside = self._prepare(x)
        else:
            try:
                arguments, beside = self._prepare(x)
            except Exception as error:
                self._raise_on_every_rank(error)
        if self._workspace is None and self.group.size > 1:
            _reserve_untraced(self, arguments["x"].shape[0])
        with torch.autocast(x.device.type, enabled=False):
            out = functional.moe(
                **arguments,
                workspace=self._workspace,
                config=self.config,
                swiglu_limit=self.swiglu_limit,
                num_experts=self.num_experts,
                gradient_accumulation_fusion=self.gradient_accumulation_fusion,
            )
            out = (out if beside is None else beside + out).to(x.dtype)
            # Not a view, whose in-place change would detach hooks on it (of FSDP2, for one) from
            # the graph. Nobody else has this memory.
            return torch.ops.aten._unsafe_view(out, x.shape)

    def _check_input(self, x: Tensor) -> None:
        refuse_tracing("MoELayer")
        require_input("x", x, "MoELayer", self.router.weight.device)
        if x.dim() == 0 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x: expected shape [..., {self.hidden_size}], got {list(x.shape)}")
        as_dtype("x", x.dtype, tuple(PRECISIONS.values()))  # a tuple: for PyTorch 2.8's Dynamo

    def _raise_on_every_rank(self, problem: Exception) -> NoReturn:
        """Raises here and in the other ranks, which are waiting for this one in their forwards."""
        if self._workspace is not None:
            with self._workspace.reporting_errors(_C.OP_SCHEDULE):
                raise problem
        with raising_on_every_rank(self.group, self.config):
            raise problem

    def _prepare(self, x: Tensor) -> tuple[dict[str, Any], Tensor | None]:
        """What a forward does on this rank alone, before the ranks meet.

        Returns:
          The tensors for functional.moe by name, and what is to be added to its result [T, H].
        """
        self._check_input(x)
        dtype = PRECISIONS[self.precision]
        # The precision is the layer's own: autocast must not change what the ranks agreed on.
        with torch.autocast(x.device.type, enabled=False):
            # Three users: their gradients are added with one rounding.
            tokens, to_router, to_shared = fan_out(x.reshape(-1, self.hidden_size), 3)
            topk_idx, topk_weight = self._route(to_router)
            arguments = {"x": tokens.to(dtype), "topk_idx": topk_idx, "topk_weight": topk_weight}
            # Where they are to be found by their main_grad, moe casts them.
            weight_dtype = None if self.gradient_accumulation_fusion else dtype
            for name in ("w_gate", "w_up", "w_down"):
                arguments[name] = cast(getattr(self.experts, name), weight_dtype)
            beside = None
            if self.shared_expert is not None and self.gradient_block is None:
                arguments["shared"] = self.shared_expert.as_argument(to_shared, weight_dtype)
            elif self.shared_expert is not None:
                beside = self._shared_in_blocks(to_shared)
            self.expert_load.copy_(count_routes(arguments["topk_idx"], self.num_experts))
        return arguments, beside

    def _route(self, tokens: Tensor) -> Routes:
        if self.gradient_block is None:
            return self.router(tokens)
        blocks = tokens.split(self.gradient_block)
        weights = fan_out(self.router.weight, len(blocks))
        logits = map(ops.router_logits, blocks, weights)
        return self.router.route(torch.cat(list(logits)))

    def _shared_in_blocks(self, tokens: Tensor) -> Tensor:
        """The shared expert's outputs [T, H]: to the engine, the only expert of a single rank."""
        dtype = PRECISIONS[self.precision]
        blocks = tokens.split(self.gradient_block)
        names, parameters = zip(*self.shared_expert.named_parameters(), strict=True)
        copies = zip(*(fan_out(parameter, len(blocks)) for parameter in parameters), strict=True)
        outputs = []
        for block, own_parameters in zip(blocks, copies, strict=True):
            weights = dict(zip(names, own_parameters, strict=True))
            scale = block.new_ones(len(block), dtype=torch.float32)
            if "gate_weight" in weights:
                scale = output_gate(block, weights["gate_weight"])
            output = functional.moe(
                block.to(dtype),
                torch.zeros(len(block), 1, dtype=torch.int64, device=block.device),
                scale.unsqueeze(1),
                weights["w_gate"].to(dtype).unsqueeze(0),
                weights["w_up"].to(dtype).unsqueeze(0),
                weights["w_down"].to(dtype).unsqueeze(0),
                config=self.config,
                swiglu_limit=self.swiglu_limit,
            )
            outputs.append(output)
        return torch.cat(outputs)

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of which each rank holds a share, with complete gradients."""
        return self.experts.parameters()

    def replicated_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that every rank holds, with this rank's part of the gradient."""
        for name, parameter in self.named_parameters():
            if not name.startswith("experts."):
                yield parameter

    def global_expert_load(self) -> Tensor:
        """expert_load summed over the ranks of the group. Collective."""
        loads = self.group.exchange(
            "global_expert_load", self.expert_load.tolist(), self.config.timeout_seconds
        )
        return torch.tensor(loads, device="cpu").sum(dim=0)

    def update_expert_bias(self, rate: float = 1e-3, load: Tensor | None = None) -> None:
        """Moves the router's bias towards balance; once per optimizer step.

        Args:
          rate: the step of each expert's bias.
          load: routes per expert [E] over all ranks since the last update. None: those of the last
            forward (global_expert_load; collective).
        """
        self.router.update_expert_bias(self.global_expert_load() if load is None else load, rate)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The state dict with all E experts, the same on every rank. Collective."""
        return full_state.full_state_dict(self)

    def load_full_state_dict(self, state: dict[str, Tensor], strict: bool = True):
        """Loads this rank's share of full_state_dict(), of any EP size."""
        return full_state.load_full_state_dict(self, state, strict)

    def __copy__(self) -> MoELayer:
        copied = self.__class__.__new__(self.__class__)
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict) -> MoELayer:
        """A layer with its own parameters on the same rank: group and workspace are shared."""
        for shared in (self.group, self._workspace):
            memo[id(shared)] = shared
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce_ex__(self, protocol):
        if not isinstance(self.group, SingleRank):
            raise TypeError(
                "a MoELayer with a group cannot be pickled: its group belongs to this process. "
                "Save state_dict() (this rank's share) or full_state_dict() instead"
            )
        return super().__reduce_ex__(protocol)

    def extra_repr(self) -> str:
        rank = f"rank={self.group.rank} of {self.group.size}"
        return f"{rank}, precision={self.precision!r}, swiglu_limit={self.swiglu_limit}"


@torch.compiler.disable(
    reason="several ranks meet on the host to make a workspace: call MoELayer.reserve(tokens), or "
    "pass max_tokens_per_rank, before a compiled forward"
)
def _reserve_untraced(layer: MoELayer, tokens: int) -> None:
    layer.reserve(tokens)


def _common_arguments(
    layer: MoELayer, sizes: tuple[int, int, int], shared_gate: bool, dtype: torch.dtype
) -> dict[str, Any]:
    """What every rank has to have given, by the constructor's names, with defaults filled in."""
    names = ("hidden_size", "intermediate_size", "shared_intermediate_size")
    options = ("swiglu_limit", "gradient_block", "gradient_accumulation_fusion")
    return {
        **dict(zip(names, sizes, strict=True)),
        **dataclasses.asdict(layer.router.config),
        "shared_gate": shared_gate,
        **{name: getattr(layer, name) for name in options},
        # Before the precision, which it is the default of.
        "dtype": dtype,
        "precision": layer.precision,
    }


def _check_size(name: str, value: int, lowest: int) -> int:
    size = as_integer(name, value, lowest, MAX_SIZE)
    if size % 8:
        raise ValueError(f"{name}: expected a multiple of 8, got {size}")
    return size


def _check_precision(precision: str | None, dtype: torch.dtype) -> str:
    """The precision's name; None stands for that of dtype."""
    if as_choice("precision", precision, PRECISIONS, optional=True) is not None:
        return precision
    return next(name for name, value in PRECISIONS.items() if value == dtype)
