"""Runs an example as torchrun does, for tests."""

import os
import pathlib
import subprocess
import sys


def run_two_ranks(program: str, folder: pathlib.Path, *flags: str) -> subprocess.CompletedProcess:
    """Both ranks of a program, to their end; output as text. Fails the test if the program does.

    program: its source file. folder: to run in.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--local-addr=127.0.0.1"]  # a host's name may not resolve to where it listens
    environment = os.environ | {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    result = subprocess.run(
        [*command, program, *flags],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result
