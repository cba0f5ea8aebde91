"""The ranks of the example: processes of this machine, joined by torch.distributed.

CPU ranks talk over gloo; GPU ranks, one a GPU, over NCCL. Sums over ranks are trees, so that a run
repeats bit for bit, on 1, 2, 4 or 8 ranks.
"""

import contextlib
import datetime
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mok_torch.fan_out import tree_sum

# How long ranks have to end when another one has failed, before they are killed.
_GRACE_SECONDS = 5.0
_WATCH_SECONDS = 0.5

# What a group of CPU or GPU ranks talks over. Small Python objects always travel between hosts.
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class LostRankError(RuntimeError):
    """Another rank did not come to a sum, or has died."""


def launch(
    worker: Callable,
    num_ranks: int,
    *arguments,
    device: str = "cpu",
    timeout_s: float | None = None,
) -> None:
    """Runs worker(rank, *arguments) in num_ranks processes that can talk to each other.

    Returns when all have finished; an exception in one ends them all and is raised here. None of
    them outlives this process, or this call, however that ends. Ctrl-C interrupts this process
    only, which ends them.

    device: "cpu", or "cuda": rank i has GPU i.
    timeout_s: how long a collective waits for other ranks; None: PyTorch's default.
    """
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = "file://" + os.path.join(folder, "ranks")
        with _uninterrupted_children():
            context = torch.multiprocessing.spawn(
                _work_as_child,
                (os.getpid(), num_ranks, meeting_point, device, timeout_s, worker, arguments),
                num_ranks,
                join=False,
                daemon=True,  # an interrupted spawn leaves no rank behind that we would wait for
            )
        try:
            while not context.join(grace_period=_GRACE_SECONDS):
                pass
        except BaseException:
            for process in context.processes:
                process.kill()
            raise


@contextlib.contextmanager
def _uninterrupted_children() -> Iterator[None]:
    """Processes that start inside see no SIGINT: a terminal sends it to them too.

    Each of them would print where it was, above all while it imports PyTorch.
    """
    resource_tracker.ensure_running()  # which unblocks SIGINT when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def interruptible(program: str) -> Iterator[None]:
    """Ctrl-C (SIGINT) inside ends the program with one line and with status 130, as shells have it.

    program: its name.
    """
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is ending, however often one asks
        if leads():
            end_of_bar = "\n" if sys.stderr.isatty() else ""
            print(f"{end_of_bar}{program}: interrupted", file=sys.stderr)
        sys.exit(130)


def _work_as_child(rank: int, parent: int, *arguments) -> None:
    def watch():
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    # PyTorch's own way is a SIGINT, which a process may ignore, or not have asked for yet.
    threading.Thread(target=watch, daemon=True).start()
    _join_and_work(rank, *arguments)


def launched_by_torchrun() -> bool:
    """Whether this process is a rank already: torchrun has started it."""
    return dist.is_torchelastic_launched()


def num_ranks(wanted: int) -> int:
    """Of torchrun, if it has started this process, or the wanted number."""
    return int(os.environ["WORLD_SIZE"]) if launched_by_torchrun() else wanted


def count_flag() -> str:
    """The flag that says how many ranks there are, for messages to the user."""
    return "--nproc-per-node" if launched_by_torchrun() else "--ranks"


def leads() -> bool:
    """Whether this process speaks to the user: of torchrun's, rank 0 does."""
    return not launched_by_torchrun() or os.environ["RANK"] == "0"


def work_as_rank(
    worker: Callable, *arguments, device: str = "cpu", timeout_s: float | None = None
) -> None:
    """As launch, in this process, which torchrun has started as a rank."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _join_and_work(rank, num_ranks, "env://", device, timeout_s, worker, arguments)


def _join_and_work(rank, num_ranks, meeting_point, device, timeout_s, worker, arguments) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # The ranks share this machine.
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        _BACKENDS[device],
        init_method=meeting_point,
        rank=rank,
        world_size=num_ranks,
        timeout=None if timeout_s is None else datetime.timedelta(seconds=timeout_s),
    )
    try:
        worker(rank, *arguments)
    finally:
        dist.destroy_process_group()


def share_of_rank(batch: Tensor) -> Tensor:
    """This rank's part of a tensor that all ranks hold: equal, consecutive parts."""
    return batch.tensor_split(dist.get_world_size())[dist.get_rank()]


def _parts_of_ranks(part: Tensor) -> list[Tensor]:
    """The ranks' tensors, in rank order. Collective; raises LostRankError."""
    if dist.get_world_size() == 1:
        return [part]
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    try:
        dist.all_gather(parts, part.contiguous())
    except RuntimeError as error:  # gloo's; NCCL ends the process instead
        reason = str(error).strip().splitlines()[0]
        raise LostRankError(f"rank {dist.get_rank()}: another rank is gone: {reason}") from error
    return parts


def concatenate_over_ranks(part: Tensor) -> Tensor:
    """The inverse of share_of_rank, for equal parts. Collective."""
    return torch.cat(_parts_of_ranks(part))


def sum_over_ranks(part: Tensor) -> Tensor:
    """The sum of the ranks' tensors. Collective."""
    return tree_sum(_parts_of_ranks(part))


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replaces the gradients by their sums over the ranks, in one exchange. Collective."""
    if dist.get_world_size() == 1:
        return
    gradients = [parameter.grad for parameter in parameters]
    flat = sum_over_ranks(torch.cat([gradient.flatten() for gradient in gradients]))
    pieces = flat.split([gradient.numel() for gradient in gradients])
    sums = [piece.view_as(grad) for grad, piece in zip(gradients, pieces, strict=True)]
    torch._foreach_copy_(gradients, sums)
