"""The explicit calls on a GPU: launches of calls whose arguments have passed their checks.

mok_torch.explicit looks here first: a call like an earlier one (accepted_calls.py) is launched
without being checked and planned again. One engine is used all along, whatever other threads make
of the workspace meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mok_torch import _C
from mok_torch.accepted_calls import key_of_call
from mok_torch.cuda_engine import CudaEngine, keep_for_stream
from mok_torch.cuda_passes import CudaSchedule, PassCall, ScheduleCall, queue_schedule
from mok_torch.passes import LayerGrads, cuda_operands, new_output
from mok_torch.ring import DeviceRing, ForwardContext
from mok_torch.workspace import Workspace


def key_of_buffers(buffers, device: torch.device) -> object:
    """MainGrads as a part of a key: their checks look at addresses too."""
    if buffers is None:
        return None
    key, addresses = key_of_call(type(buffers), device, buffers)
    # A list cannot be hashed: where the buffers have no key, the call has none.
    return [] if key is None else (key, tuple(addresses))


def build_schedule(
    workspace: Workspace, engine: CudaEngine, call: ScheduleCall, routes: Tensor
) -> CudaSchedule:
    """Collective. routes: [..., K], contiguous."""
    try:
        return queue_schedule(engine, engine.current_stream(), call, routes)
    except Exception as error:
        workspace.report(error, _C.OP_SCHEDULE)
        raise


def forward(
    workspace: Workspace,
    engine: CudaEngine,
    call: PassCall,
    schedule: CudaSchedule,
    inputs: Sequence[int],
    x: Tensor,
) -> tuple[Tensor, ForwardContext]:
    """As mok_torch.explicit.forward. Collective. inputs: addresses."""
    try:
        buffer = engine.new_ring(call.layout.size)
        out = new_output(x)
        stream = engine.current_stream()
        keep_for_stream(stream, engine.device, schedule.stream, schedule.words)
        operands = (buffer.data_ptr(), schedule.routing, out.data_ptr())
        engine.forward(stream, call, inputs, *operands)
    except Exception as error:
        workspace.report(error, _C.OP_FORWARD)
        raise
    return out, ForwardContext(DeviceRing(buffer), 1, call.swiglu_limit, call.layout, stream)


def backward(
    workspace: Workspace,
    engine: CudaEngine,
    call: PassCall,
    schedule: CudaSchedule,
    inputs: Sequence[int],
    operands: tuple[tuple[Tensor, int], Tensor, int, LayerGrads],
):
    """Collective.

    operands: the ring's buffer and the stream that it was allocated on; d_out, kept_macrobatches
    and the gradients, see run_backward.
    """
    try:
        (buffer, allocated_on), *others = operands
        stream = engine.current_stream()
        keep_for_stream(stream, engine.device, schedule.stream, schedule.words)
        keep_for_stream(stream, engine.device, allocated_on, buffer)
        given = (buffer.data_ptr(), schedule.routing, cuda_operands(*others))
        engine.backward(stream, call, inputs, *given)
    except Exception as error:
        workspace.report(error, _C.OP_BACKWARD)
        raise
