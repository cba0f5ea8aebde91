"""State dicts that do not know about ranks: the experts of all ranks under the local names.

Works on any module that contains MoELayers; everything else in the state dict is replicated and
taken from this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mok_torch.errors import as_shared_error
from mok_torch.groups import DistributedGroup
from mok_torch.scalars import as_flag

_CALL = "full_state_dict"
_WORDS_AT_ONCE = 2**20  # what a digest takes to hash them: 8 MiB, a few times
_MULTIPLIER = 0x1E3779B97F4A7C15  # odd, below 2^63
_NO_SIGNS = 2**35 - 1  # what PyTorch shifts in at the left of 64 - 29 bits


def _moe_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(key prefix, layer) of every MoELayer in module, in the same order on every rank."""
    from mok_torch.layer import MoELayer

    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    # A layer used twice is in the state dict twice.
    for name, submodule in module.named_modules(remove_duplicate=False):
        if isinstance(submodule, MoELayer):
            yield f"{name}.experts." if name else "experts.", submodule


class _Announcement(NamedTuple):
    """What a rank is about to gather; equal on all ranks.

    Attributes:
      name: in the state dict.
      num_experts: of all ranks. shape, dtype: of one.
      router, shared_expert: digests. Every rank holds a layer's whole router, which tells the
        layers of a model apart, and its whole shared expert.
    """

    name: str
    num_experts: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    router: int
    shared_expert: int

    def __str__(self) -> str:
        return f"{self.name} of {self.num_experts} experts, {list(self.shape)} {self.dtype} each"


def _gather_layer(prefix: str, layer, digests: tuple[int, int]) -> dict[str, Tensor]:
    """Every rank's experts of a layer, concatenated, by their names. Collective."""
    gathered = {}
    for name, parameter in layer.experts.named_parameters():
        local = parameter.detach()
        sizes = (layer.num_experts, local.shape[1:], local.dtype)
        own = _Announcement(prefix + name, *sizes, *digests)
        gathered[own.name] = _gather(local, layer, own)
    if isinstance(layer.group, DistributedGroup):
        # A rank whose last broadcast has failed comes to this one with what it has met with.
        _meet(layer, None)
    return gathered


def _digests(layer) -> tuple[int, int]:
    """Of the bits of what every rank holds whole: a layer's router, and its shared expert."""
    if layer.group.size == 1:
        return 0, 0
    return _digest(layer.router), _digest(layer.shared_expert)


def _digest(module: nn.Module | None) -> int:
    """Of the bits of a module's tensors; 0 of none, and of a shard (of FSDP)."""
    total = torch.zeros((), dtype=torch.int64, device="cpu")
    for tensor in module.state_dict().values() if module is not None else ():
        if not hasattr(tensor, "to_local"):
            total = _mix(total + _digest_of_tensor(tensor))
    return int(total)


def _digest_of_tensor(tensor: Tensor) -> Tensor:
    """The sum of a hash of each word and its place, int64 that wraps: the same in any order."""
    halves = tensor.detach().contiguous().flatten().view(torch.int16)
    halves = torch.nn.functional.pad(halves, (0, -halves.numel() % 4))
    total = torch.zeros((), dtype=torch.int64, device="cpu")
    for index, words in enumerate(halves.view(torch.int64).split(_WORDS_AT_ONCE)):
        begin = index * _WORDS_AT_ONCE
        places = torch.arange(begin, begin + words.numel(), device=words.device)
        total += _mix(_mix(words) + places).sum().cpu()
    return total


def _mix(words: Tensor) -> Tensor:
    """A permutation of the int64 words, modulo 2^64, which spreads every bit."""
    words = words * _MULTIPLIER
    return words ^ (words >> 29 & _NO_SIGNS)


def _gather(local: Tensor, layer, own: _Announcement) -> Tensor:
    """Concatenates every rank's experts. Collective."""
    group = layer.group
    if not isinstance(group, DistributedGroup):
        # Ranks are threads: a peer may train on before this rank has read its tensor.
        given = _meet(layer, (own, local.clone()))
        _compare([announcement for announcement, _ in given])
        return torch.cat([tensor for _, tensor in given])
    _compare(_meet(layer, own))
    try:
        return _broadcast_all(local, layer)
    except Exception as error:
        # Gloo's text names no rank. One that died meanwhile does not come to this either; the
        # others are here, or in the meeting that they come to next.
        _meet(layer, error)
        raise


def _meet(layer, own) -> list:
    """What the ranks come with, an _Announcement for example; raises an Exception of another one.

    RankTimeoutError names a rank that does not come.
    """
    is_error = isinstance(own, Exception)
    value = as_shared_error(own)[0] if is_error else own
    answers = layer.group.exchange(_CALL, value, layer.config.timeout_seconds)
    for peer, other in enumerate(answers):
        if not is_error and isinstance(other, Exception):
            raise type(other)(f"rank {peer}: {other}")
    return answers


def _compare(announcements: list[_Announcement | None]):
    """Raises, on every rank, unless all gather the same."""
    first, *others = announcements
    for peer, other in enumerate(others, start=1):
        if other == first:
            continue
        if first is not None and other is not None and first[:4] == other[:4]:
            part = "shared expert" if other.router == first.router else "router's weight or bias"
            raise ValueError(
                f"{_CALL}: {first.name}: the {part} on rank {peer} is not that on rank 0: the "
                "ranks gather different layers, or their replicas have drifted apart"
            )
        raise ValueError(
            f"{_CALL}: ranks gather different tensors: rank 0 {first or 'none'}, rank {peer} "
            f"{other or 'none'}"
        )


def _broadcast_all(local: Tensor, layer) -> Tensor:
    group = layer.group
    full = local.new_empty(layer.num_experts, *local.shape[1:])
    for rank in range(group.size):
        begin, end = layer.owned_experts(rank)
        if end == begin:
            continue
        piece = full[begin:end]
        if rank == group.rank:
            piece.copy_(local)
        dist.broadcast(piece, group_src=rank, group=group.group)
    return full


@torch.no_grad()
def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """module.state_dict() with the experts of all ranks; the same on every rank. Collective.

    Raises:
      ValueError: on every rank, if they gather different layers, or their replicas differ.
      RankTimeoutError: a rank did not come.
    """
    layers = list(_moe_layers(module))
    try:
        state = module.state_dict()
        digests = [_digests(layer) for _, layer in layers]
    except Exception as error:
        if layers:
            _meet(layers[0][1], error)  # in place of this rank's first announcement
        raise
    for (prefix, layer), digests_of_layer in zip(layers, digests, strict=True):
        state |= _gather_layer(prefix, layer, digests_of_layer)
    return state


def load_full_state_dict(module: nn.Module, state: dict[str, Tensor], strict: bool = True):
    """Loads what full_state_dict returned, on any number of ranks; not collective.

    Returns what Module.load_state_dict returns.

    Raises:
      ValueError: the experts of a layer are not the full layer's.
      TypeError: state is no dict, or strict no bool.
    """
    as_flag("strict", strict)
    if not isinstance(state, Mapping):
        raise TypeError(f"state: expected a dict of tensors, got {type(state).__name__}")
    state = dict(state)
    for prefix, layer in _moe_layers(module):
        begin, end = layer.owned_experts(layer.group.rank)
        for name, parameter in layer.experts.named_parameters():
            full = state.get(prefix + name)
            if full is None:
                continue  # load_state_dict reports it
            if not isinstance(full, Tensor):
                raise TypeError(
                    f"{prefix}{name}: expected a torch.Tensor, got {type(full).__name__}"
                )
            expected = (layer.num_experts, *parameter.shape[1:])
            if tuple(full.shape) != expected:
                raise ValueError(
                    f"{prefix}{name}: expected all experts, {list(expected)}, "
                    f"got {list(full.shape)}"
                )
            state[prefix + name] = full[begin:end]
    return module.load_state_dict(state, strict=strict)
