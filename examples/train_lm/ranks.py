"""The ranks of the example: processes of this machine, joined by torch.distributed over gloo.

Sums over ranks are trees, so that a run repeats bit for bit, on 1, 2, 4 or 8 ranks.
"""

import os
import tempfile
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mok_torch.fan_out import tree_sum


def launch(worker: Callable, num_ranks: int, *arguments) -> None:
    """Runs worker(rank, *arguments) in num_ranks processes that can talk to each other.

    Returns when all have finished; an exception in one ends them all and is raised here.
    """
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = os.path.join(folder, "ranks")
        torch.multiprocessing.spawn(
            _join_and_work, (num_ranks, meeting_point, worker, arguments), num_ranks
        )


def _join_and_work(rank: int, num_ranks: int, meeting_point: str, worker, arguments) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # The ranks share this machine.
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=num_ranks
    )
    try:
        worker(rank, *arguments)
    finally:
        dist.destroy_process_group()


def share_of_rank(batch: Tensor) -> Tensor:
    """This rank's part of a tensor that all ranks hold: equal, consecutive parts."""
    return batch.tensor_split(dist.get_world_size())[dist.get_rank()]


def concatenate_over_ranks(part: Tensor) -> Tensor:
    """The inverse of share_of_rank, for equal parts. Collective."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts)


def sum_over_ranks(part: Tensor) -> Tensor:
    """The sum of the ranks' tensors. Collective."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return tree_sum(parts)


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replaces the gradients by their sums over the ranks, in one exchange. Collective."""
    gradients = [parameter.grad for parameter in parameters]
    flat = sum_over_ranks(torch.cat([gradient.flatten() for gradient in gradients]))
    pieces = flat.split([gradient.numel() for gradient in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view_as(gradient))
