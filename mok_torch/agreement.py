"""What ranks ask for while a workspace is made or grows, and their common verdict about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mok_torch.config import MoKConfig
from mok_torch.errors import as_shared_error
from mok_torch.groups import MAKING_CALL, WORKSPACE_CALL


@dataclasses.dataclass(frozen=True)
class Request:
    """What one rank asks for. Every rank sees all requests and reaches the same verdict.

    Attributes:
      has_cached: a usable workspace of these shapes is in this rank's cache.
      layer: what the layer that asks has to have in common with those of the other ranks, by the
        names of MoELayer's arguments; empty where no layer asks.
    """

    hidden_size: int
    topk: int
    dtype: torch.dtype
    num_local_tokens: int
    timeout_seconds: float
    device: str = "cpu"
    has_cached: bool = False
    layer: dict[str, Any] = dataclasses.field(default_factory=dict)


def agree(group, make_request: Callable[[], Request]) -> Request:
    """The request that all ranks make, with the largest num_local_tokens.

    Collective. What is wrong on one rank, or differs between ranks, raises on every rank.
    """
    try:
        answer: Request | Exception = make_request()
        timeout_seconds = answer.timeout_seconds
    except Exception as error:  # the other ranks are waiting, whatever it is
        answer = error
        timeout_seconds = MoKConfig().timeout_seconds
    answers = group.exchange(WORKSPACE_CALL, _portable(answer), timeout_seconds, resumes=True)
    if isinstance(answer, Exception):
        raise answer
    for peer, given in enumerate(answers):
        if isinstance(given, Exception):
            raise type(given)(f"rank {peer}: {given}") from given
    _refuse_differences(answers)
    return dataclasses.replace(
        answers[0],
        num_local_tokens=max(other.num_local_tokens for other in answers),
        timeout_seconds=max(other.timeout_seconds for other in answers),
        has_cached=all(other.has_cached for other in answers),
    )


def together(group, timeout_seconds: float, action: Callable[[], Any]) -> Any:
    """What action returns, if it returns on every rank; else every rank raises.

    Collective, while a workspace is made or grows. The action itself meets nobody: its error, of
    any kind, reaches the ranks that wait for this one here.
    """
    result = problem = None
    try:
        result = action()
    except Exception as error:
        problem = error
    shared = None if problem is None else as_shared_error(problem)[0]
    try:
        try:
            answers = group.exchange(MAKING_CALL, shared, timeout_seconds)
        except Exception as unheard:
            if problem is None:
                raise
            raise problem from unheard
        for peer, other in enumerate(answers):
            if problem is None and other is not None:
                problem = type(other)(f"rank {peer}: {other}")
        if problem is not None:
            problem.is_shared = True
            raise problem
    finally:
        del problem  # which holds this frame, and through it what could not all be allocated
    return result


def _portable(answer: Request | Exception) -> Request | Exception:
    """The answer as any process can read it: an exception of another type may not survive."""
    return answer if isinstance(answer, Request) else as_shared_error(answer)[0]


def _refuse_differences(requests: Sequence[Request]):
    """Raises for the first argument that ranks have given different values of."""
    # The layers' first: where the two overlap (top_k), those are the names that the caller knows.
    # A rank that asks without a layer has nothing to compare with them.
    layers = {rank: request.layer for rank, request in enumerate(requests) if request.layer}
    for name in next(iter(layers.values()), {}):
        _require_one_value(name, {rank: layer[name] for rank, layer in layers.items()})
    for name in ("hidden_size", "topk", "dtype", "device"):
        values = {rank: getattr(request, name) for rank, request in enumerate(requests)}
        _require_one_value(name, values)


def _require_one_value(name: str, values: dict[int, Any]):
    """Raises if not all ranks have given the same value of an argument."""
    ranks_of: dict[str, list[str]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(repr(value), []).append(str(rank))
    if len(ranks_of) == 1:
        return
    given = (
        f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        for value, ranks in ranks_of.items()
    )
    raise ValueError(f"{name}: ranks disagree: {'; '.join(given)}")
