"""Ranks as processes of a gloo group on this machine, some of which may be killed, for tests."""

from __future__ import annotations

import os
import pathlib
import signal
import time
import traceback
from typing import NoReturn

import torch
import torch.distributed as dist

_SHARED_MEMORY = pathlib.Path("/dev/shm")


def run_processes(worker, size, folder, *arguments, killed=(), store="file"):
    """worker(rank, size, folder, *arguments) in each of `size` processes; raises their errors.

    killed: the ranks that end in die().
    store: of the default process group: "file", or "tcp", which rank 0 keeps.
    """
    context = torch.multiprocessing.get_context("spawn")
    before = set(_SHARED_MEMORY.glob("mok*"))
    processes = []
    for rank in range(size):
        parameters = (worker, rank, size, folder, store, *arguments)
        processes.append(context.Process(target=_enter, args=parameters, daemon=True))
        processes[-1].start()
    for process in processes:
        process.join(200)
    errors = "\n".join(path.read_text() for path in sorted(folder.glob("error.*")))
    assert not errors, errors
    for rank, process in enumerate(processes):
        assert process.exitcode == (-signal.SIGKILL if rank in killed else 0), rank
    # Whatever happened, nothing is left behind.
    assert set(_SHARED_MEMORY.glob("mok*")) <= before


def _enter(worker, rank, size, folder, store, *arguments):
    """Runs worker in a process of a default process group; a traceback goes to a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        if store == "tcp":
            dist.init_process_group(
                "gloo", store=_tcp_store(rank, folder), rank=rank, world_size=size
            )
        else:
            meeting_point = f"file://{folder}/meet"
            dist.init_process_group("gloo", meeting_point, rank=rank, world_size=size)
        worker(rank, size, folder, *arguments)
        # A process that leaves earlier takes gloo's connections with it.
        (folder / f"done.{rank}").touch()
        deadline = time.monotonic() + 120
        while len(list(folder.glob("done.*"))) < size and time.monotonic() < deadline:
            time.sleep(0.01)
    except BaseException:
        (folder / f"error.{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def _tcp_store(rank, folder) -> dist.TCPStore:
    """At a port that the system chooses."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(folder / "port")
        return store
    deadline = time.monotonic() + 60
    while not (folder / "port").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int((folder / "port").read_text()), is_master=False)


def die(rank, folder) -> NoReturn:
    """Kills this process, which the others need not wait for at the end."""
    (folder / f"done.{rank}").touch()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


def raised_by(function, *arguments, **options):
    """The exception that the call raises."""
    try:
        function(*arguments, **options)
    except Exception as error:
        return error
    raise AssertionError("expected an exception")
