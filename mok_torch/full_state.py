"""State dicts that do not know about ranks: the experts of all ranks under the local names.

Works on any module that contains MoELayers; everything else in the state dict is replicated and
taken from this rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mok_torch.errors import as_shared_error
from mok_torch.groups import DistributedGroup, exchange_in

_CALL = "full_state_dict"


def _moe_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(key prefix, layer) of every MoELayer in module, in the same order on every rank."""
    from mok_torch.layer import MoELayer

    # A layer used twice is in the state dict twice.
    for name, submodule in module.named_modules(remove_duplicate=False):
        if isinstance(submodule, MoELayer):
            yield f"{name}.experts." if name else "experts.", submodule


def _gather(local: Tensor, layer) -> Tensor:
    """Concatenates every rank's experts. Collective."""
    group = layer.group
    if not isinstance(group, DistributedGroup):
        # Ranks are threads: a peer may train on before this rank has read its tensor.
        return torch.cat(exchange_in(_CALL, group, local.clone(), layer.config.timeout_seconds))
    _meet(layer, None)
    try:
        return _broadcast_all(local, layer)
    except RuntimeError as error:
        # Gloo's text names no rank. One that died meanwhile does not come to this either; the
        # others are here, or in the meeting that they come to next.
        _meet(layer, error)
        raise


def _meet(layer, problem: Exception | None):
    """Names a rank that does not come (RankTimeoutError); raises what other ranks have met with."""
    shared = None if problem is None else as_shared_error(problem)[0]
    others = exchange_in(_CALL, layer.group, shared, layer.config.timeout_seconds)
    for peer, other in enumerate(others):
        if problem is None and isinstance(other, Exception):
            raise type(other)(f"rank {peer}: {other}")


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
    """module.state_dict() with the experts of all ranks; the same on every rank. Collective."""
    state = module.state_dict()
    for prefix, layer in _moe_layers(module):
        for name, parameter in layer.experts.named_parameters():
            state[prefix + name] = _gather(parameter.detach(), layer)
    return state


def load_full_state_dict(module: nn.Module, state: dict[str, Tensor], strict: bool = True):
    """Loads what full_state_dict returned, on any number of ranks; not collective.

    Returns what Module.load_state_dict returns.

    Raises:
      ValueError: the experts of a layer are not the full layer's.
    """
    state = dict(state)
    for prefix, layer in _moe_layers(module):
        begin, end = layer.owned_experts(layer.group.rank)
        for name, parameter in layer.experts.named_parameters():
            full = state.get(prefix + name)
            if full is None:
                continue  # load_state_dict reports it
            expected = (layer.num_experts, *parameter.shape[1:])
            if tuple(full.shape) != expected:
                raise ValueError(
                    f"{prefix}{name}: expected all experts, {list(expected)}, "
                    f"got {list(full.shape)}"
                )
            state[prefix + name] = full[begin:end]
    return module.load_state_dict(state, strict=strict)
