"""The explicit calls on a GPU: launches of calls whose arguments have passed their checks.

mok_torch.explicit looks here first: a call like an earlier one (accepted_calls.py) is launched
without being checked and planned again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from torch import Tensor

from mok_torch import _C, cuda_passes
from mok_torch.accepted_calls import CallKey, exactly, key_of_call
from mok_torch.cuda_engine import CudaEngine, keep_for_stream
from mok_torch.cuda_passes import CudaSchedule, PassCall, ScheduleCall
from mok_torch.passes import LayerGrads, cuda_operands
from mok_torch.ring import DeviceRing
from mok_torch.workspace import Workspace


class Place(NamedTuple):
    """Where a call runs; one engine all along, whatever other threads make of the workspace.

    Attributes:
      key: of the call, None if it is not to be remembered.
    """

    workspace: Workspace
    engine: CudaEngine
    key: CallKey | None

    def accept(self, call):
        """Remembers what the call came to."""
        self.engine.accepted.add(self.key, call)


def find(workspace: Workspace, settings: Hashable, tensors: Sequence[Tensor | None]):
    """The Place of a call on a GPU, and what an equal call came to; None and None on a CPU."""
    if not workspace.on_gpu:
        return None, None
    engine, key = workspace.engine, key_of_call(settings, tensors)
    return Place(workspace, engine, key), engine.accepted.find(key)


def key_of_buffers(buffers) -> object:
    """MainGrads as a part of a key: their checks look at addresses too."""
    if buffers is None:
        return None
    key = key_of_call(exactly(buffers)[0], buffers)
    # A list cannot be hashed: where the buffers have no key, the call has none.
    return [] if key is None else (key.key, tuple(key.addresses))


def build_schedule(place: Place, call: ScheduleCall, routes: Tensor) -> CudaSchedule:
    """Collective. routes: [..., K], contiguous."""
    workspace, engine, _ = place
    try:
        schedule = cuda_passes.new_schedule(engine, call.sizes)
        cuda_passes.queue_schedule(engine, call, schedule, routes)
    except Exception as error:
        workspace.report(error, _C.OP_SCHEDULE)
        raise
    return schedule


def forward(
    place: Place, call: PassCall, schedule: CudaSchedule, inputs: Sequence[int], x: Tensor
) -> tuple[Tensor, DeviceRing, int]:
    """The output, of x's shape, the ring and their stream. Collective. inputs: addresses."""
    workspace, engine, _ = place
    try:
        ring = DeviceRing.empty(call.layout, x)
        out = x.new_empty(x.shape)
        stream = engine.current_stream()
        keep_for_stream(stream, engine.device, schedule.stream, schedule.words)
        addresses = call.layout.addresses(ring.buffer.data_ptr())
        cuda_passes.queue_forward(engine, call, schedule, inputs, addresses, out)
    except Exception as error:
        workspace.report(error, _C.OP_FORWARD)
        raise
    return out, ring, stream


def backward(
    place: Place,
    call: PassCall,
    schedule: CudaSchedule,
    inputs: Sequence[int],
    ring: tuple[Tensor, int],
    operands: tuple[Tensor, int, LayerGrads],
):
    """Collective.

    ring: its buffer, and the stream that it was allocated on. operands: d_out, kept_macrobatches
    and the gradients, see run_backward.
    """
    workspace, engine, _ = place
    try:
        buffer, allocated_on = ring
        stream = engine.current_stream()
        keep_for_stream(stream, engine.device, schedule.stream, schedule.words)
        keep_for_stream(stream, engine.device, allocated_on, buffer)
        addresses = call.layout.addresses(buffer.data_ptr())
        cuda_passes.queue_backward(
            engine, call, schedule, inputs, addresses, cuda_operands(*operands)
        )
    except Exception as error:
        workspace.report(error, _C.OP_BACKWARD)
        raise
