"""`python -m mok_torch info`: versions, this machine, and what the engine can use of it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil

import rich.console
import rich.table
import torch
from absl import app, flags

from mok_torch import _C
from mok_torch.cuda_engine import cuda_device

_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of a table.")


def cpu_name() -> str:
    """The model name that Linux reports; else the architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def version() -> str:
    """That of the installed wheel."""
    try:
        return importlib.metadata.version("mok-torch")
    except importlib.metadata.PackageNotFoundError:
        return "source tree"


def gpus() -> list[str]:
    """The GPUs that PyTorch finds, with what keeps the engine from one in brackets."""
    found = []
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        try:
            cuda_device(torch.device("cuda", index))
        except ValueError as error:
            name = f"{name} (not used: {error})"
        found.append(name)
    return found


def collect() -> dict:
    """Everything that the command prints, as plain values."""
    isas = [name for isa, name in enumerate(_C.ISA_NAMES) if _C.isa_supported(isa)]
    shared_memory = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "mok_torch": version(),
        "engine_api": _C.API_VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "cpu": cpu_name(),
        "cores": _C.num_cores(),
        "backends": ["host", "cuda"] if _C.CUDA_BUILT else ["host"],
        "gpus": gpus(),
        "isas": isas,
        "best_isa": _C.ISA_NAMES[_C.best_isa()],
        "shared_memory_free_bytes": shared_memory.free if shared_memory else 0,
    }


def main(argv: list[str]) -> int:
    """Prints the table, or JSON."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    values = collect()
    if _JSON.value:
        print(json.dumps(values))
        return 0
    table = rich.table.Table(show_header=False)
    mebibytes = values.pop("shared_memory_free_bytes") // 2**20
    values["shared_memory"] = f"{mebibytes} MiB free in /dev/shm"
    for name, value in values.items():
        text = (", ".join(value) or "none") if isinstance(value, list) else str(value)
        table.add_row(name.replace("_", " "), text)
    rich.console.Console().print(table)
    return 0
