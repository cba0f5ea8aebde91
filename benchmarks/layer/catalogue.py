"""Which layers there are, and which of them can run here."""

import importlib.util
import sys
from collections.abc import Callable, Collection

from benchmarks.layer.all_gather_layer import NcclAllGather, TokenLayer
from benchmarks.layer.all_to_all_layer import AllToAllLayer
from benchmarks.layer.grouped_linear import CublasLoop, TorchGroupedMm
from benchmarks.layer.installed_peers import (
    DeepEpExchange,
    SonicMoeLayer,
    TransformerEngineLinear,
)
from benchmarks.layer.layers import Layer, MokLayer
from benchmarks.layer.problem import Problem

# Name on the command line: what makes the layer.
LAYERS: dict[str, Callable[[Problem], Layer]] = {
    "mok": MokLayer,
    "all_gather_grouped_mm": lambda p: TokenLayer(p, NcclAllGather(p), TorchGroupedMm),
    "all_gather_cublas": lambda p: TokenLayer(p, NcclAllGather(p), CublasLoop),
    "all_to_all_grouped_mm": lambda p: AllToAllLayer(p, TorchGroupedMm),
    "all_to_all_cublas": lambda p: AllToAllLayer(p, CublasLoop),
    "all_to_all_in_2_grouped_mm": lambda p: AllToAllLayer(p, TorchGroupedMm, parts=2),
    "all_to_all_in_2_cublas": lambda p: AllToAllLayer(p, CublasLoop, parts=2),
    "deep_ep_grouped_mm": lambda p: TokenLayer(p, DeepEpExchange(p), TorchGroupedMm),
    "deep_ep_cublas": lambda p: TokenLayer(p, DeepEpExchange(p), CublasLoop),
    "transformer_engine": lambda p: TokenLayer(p, NcclAllGather(p), TransformerEngineLinear),
    "sonic_moe": SonicMoeLayer,
}

# Packages that a layer needs beyond PyTorch, all of them for GPUs only.
_NEEDS = {
    "deep_ep_grouped_mm": "deep_ep",
    "deep_ep_cublas": "deep_ep",
    "transformer_engine": "transformer_engine",
    "sonic_moe": "sonicmoe",
}


def missing_package(name: str) -> str | None:
    """What would have to be installed for the layer, if anything."""
    package = _NEEDS.get(name)
    if package is None or package in sys.modules or importlib.util.find_spec(package):
        return None
    return package


def available_layers(on_gpu: bool) -> list[str]:
    """Names of the layers that can run: their packages are installed."""
    candidates = LAYERS if on_gpu else LAYERS.keys() - _NEEDS.keys()
    return [name for name in LAYERS if name in candidates and not missing_package(name)]


def make_layers(
    problem: Problem, names: list[str] | None, forward_only: Collection[str]
) -> tuple[list[Layer], set[str]]:
    """The layers, and which of their names are in forward_only.

    names, forward_only: on the command line; names None: all that are available.
    """
    layers = {name: LAYERS[name](problem) for name in names or available_layers(problem.x.is_cuda)}
    without = {layer.name for name, layer in layers.items() if name in forward_only}
    return list(layers.values()), without
