"""Memory of a step (plan, forward, backward), and what a step cannot do without.

    needed = inputs + outputs + ring + weights + weight gradients
      inputs            x, d_out [T, H]; expert ids int64 and router weights fp32 [T, K]
      outputs           out, d_x [T, H]; gradient of the router weights fp32 [T, K]
      ring              x [ring rows, H], gate and up [ring rows, I] of the routed experts, gate and
                        up [T, Is] of the shared one: what a forward keeps for its backward
      weights           of the local experts 3 H I each, of the shared expert 3 H Is
      weight gradients  as many, in the weights' dtype

    needed with rows = needed + the rows that a backward has beside a forward's, as part of the ring
      in the ring       d_out [ring rows, H], the router weight times h [ring rows, I]; of the
                        shared expert the latter [T, Is]. (The gradients of gate and up replace
                        these.) Weight gradients read all rows of an expert: none can go before.
      on their way      d_x of each route [T K, H], on the rank of the token: they are summed in a
                        fixed order once all have come

    measured = inputs + weights + what the layer holds between steps (symmetric memory, counters)
               + the peak of what it allocates from PyTorch during a step

The ring's rows are those that MoK keeps by default: a balanced load and a quarter, or everything on
one rank (mok_torch/plan.py). Peers are held against the same number: they keep every row, and their
re-arranged copies of weights count as the weights. Buffers inside NCCL are not seen.
"""

import dataclasses

import torch
import torch.distributed as dist

from benchmarks.layer.cases import Case
from benchmarks.layer.layers import Layer
from benchmarks.layer.problem import GRADIENTS, Problem
from mok_torch.functional import MoKConfig
from mok_torch.plan import ring_rows

_ID_BYTES, _FP32_BYTES = 8, 4


@dataclasses.dataclass
class Memory:
    """Bytes of a step on the rank with the most."""

    measured: int
    needed: int
    backward_rows: int  # what "needed with rows" counts beside them

    @property
    def over_needed(self) -> float:
        return self.measured / self.needed

    @property
    def over_needed_with_rows(self) -> float:
        return self.measured / (self.needed + self.backward_rows)


def needed_bytes(case: Case, ranks: int, element_bytes: int) -> int:
    """The formula above, of one rank."""
    tokens = case.tokens * case.hidden
    routes = case.tokens * case.topk
    inputs = 2 * tokens * element_bytes + routes * (_ID_BYTES + _FP32_BYTES)
    outputs = 2 * tokens * element_bytes + routes * _FP32_BYTES
    ring = _rows_of_ring(case, ranks) * (case.hidden + 2 * case.intermediate)
    ring += 2 * case.tokens * case.shared
    weights = 3 * case.hidden * (case.local_experts * case.intermediate + case.shared)
    return inputs + outputs + (ring + 2 * weights) * element_bytes


def backward_rows_bytes(case: Case, ranks: int, element_bytes: int) -> int:
    """The rows of "needed with rows", of one rank."""
    ring = _rows_of_ring(case, ranks) * (case.hidden + case.intermediate)
    routes = case.tokens * case.topk * case.hidden
    return (ring + case.tokens * case.shared + routes) * element_bytes


def _rows_of_ring(case: Case, ranks: int) -> int:
    return ring_rows(MoKConfig(), ranks, ranks * case.tokens, case.topk, case.local_experts)


def given_bytes(problem: Problem) -> int:
    """Inputs and weights: what exists before a step."""
    return sum(tensor.nbytes for tensor in problem.tensors().values())


class DeviceMemory:
    """PyTorch's bookkeeping of the memory of a GPU."""

    def __init__(self, device: torch.device):
        self._device = device

    def allocated(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.memory_allocated(self._device)

    def peak_since(self, allocated: int) -> int:
        """How far it went above `allocated` after the last restart."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - allocated

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def step_bytes(layer: Layer, problem: Problem, memory: DeviceMemory) -> int:
    """Measured bytes of this rank. Collective; the layer has not run before.

    (What a layer keeps of its last forward would be counted as there before the step.)
    """
    before = memory.allocated()
    memory.restart()
    layer.plan()
    out = layer.forward()
    gradients = layer.backward()
    peak = memory.peak_since(before)
    if out.shape != problem.x.shape or set(gradients) != set(GRADIENTS):
        raise RuntimeError(f"{layer.name}: not the results of a step")
    return given_bytes(problem) + layer.resident_bytes + peak


def measure_memory(layers: list[Layer], forward_only: set[str], problem: Problem) -> dict:
    """Memory by layer name, of those with a backward; none on a CPU. Collective."""
    if not problem.x.is_cuda:
        return {}
    sizes = (problem.case, problem.ranks, problem.x.element_size())
    needed, rows = needed_bytes(*sizes), backward_rows_bytes(*sizes)
    memory, found = DeviceMemory(problem.x.device), {}
    for layer in layers:
        if layer.name in forward_only:
            continue
        most = torch.tensor(step_bytes(layer, problem, memory), device=problem.x.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        found[layer.name] = Memory(int(most), needed, rows)
    return found
