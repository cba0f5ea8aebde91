"""Argument checks: every error names the argument, what was expected and what was given."""

from __future__ import annotations

import contextlib
import re
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mok_torch import _C
from mok_torch.accepted_calls import ALIGNMENT
from mok_torch.dtypes import as_dtype
from mok_torch.scalars import MAX_SIZE, as_integer, as_positive_number


class ArgumentNames(NamedTuple):
    """What the caller calls the arguments; errors use these names."""

    topk_idx: str = "topk_idx"
    topk_weight: str = "topk_weight"
    gate: str = "w_gate"
    up: str = "w_up"
    down: str = "w_down"
    shared_gate: str = "shared.w_gate"
    shared_up: str = "shared.w_up"
    shared_down: str = "shared.w_down"
    shared_scale: str = "shared.scale"
    # Of this rank's experts.
    num_local_experts: str = "w_gate.shape[0]"
    # What to say of ranks whose passes are of different schedules.
    one_schedule: str = (
        "expected the backward of the same forward on every rank, got those of different forwards"
    )


MOE_NAMES = ArgumentNames()
EXPLICIT_NAMES = ArgumentNames(
    topk_idx="top_experts",
    topk_weight="router_weights",
    gate="routed_gate_weights",
    up="routed_up_weights",
    down="routed_down_weights",
    shared_gate="shared_gate_weights",
    shared_up="shared_up_weights",
    shared_down="shared_down_weights",
    shared_scale="shared_scale",
    num_local_experts="num_local_experts",
    one_schedule="schedule: expected that of the same build_schedule on every rank, and its "
    "forward's context, got those of different calls",
)

# In the engine's errors: its names of arguments, and ranks whose schedules have other fingerprints.
_ENGINE_NAMES = re.compile(r"\b(topk_idx|num_local_experts)\b")
_OTHER_SCHEDULE = re.compile(
    r"^(\w+): ranks disagree on schedule \(.*\): rank 0 has \S+, rank (\d+) has \S+$"
)


@contextlib.contextmanager
def in_words_of(names: ArgumentNames):
    """What the engine says of the arguments of the block's calls, in what the caller calls them."""
    try:
        yield
    except ValueError as error:
        text = str(error).replace("context.ring_x:", "context.ring.x:")
        text = _ENGINE_NAMES.sub(lambda found: getattr(names, found[0]), text)
        if found := _OTHER_SCHEDULE.match(text):
            text = f"{found[1]}: {names.one_schedule} on ranks 0 and {found[2]}"
        error.args = (text,)
        raise


class SharedTensors(NamedTuple):
    """The shared expert: gate and up [Is, H], down [H, Is], scale fp32 [T] or None."""

    gate: Tensor
    up: Tensor
    down: Tensor
    scale: Tensor | None


class LayerTensors(NamedTuple):
    """The inputs of a pass, checked, contiguous, leading dimensions flattened to T tokens.

    x [T, H], topk_weight fp32 [T, K], gate and up [El, I, H], down [El, H, I].
    """

    x: Tensor
    topk_weight: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    shared: SharedTensors | None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """x, topk_weight, routed gate, up, down, shared gate, up, down, scale."""
        return (*self[:5], *(self.shared or (None,) * 4))

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    @property
    def num_local_experts(self) -> int:
        return self.gate.shape[0]

    @property
    def intermediate(self) -> int:
        return self.gate.shape[1]

    @property
    def shared_intermediate(self) -> int:
        return 0 if self.shared is None else self.shared.gate.shape[0]


def require_dense(name: str, value, device: torch.device | None = None) -> Tensor:
    """The value, if it is a dense tensor on the device; None: on a CPU or a GPU.

    Its values may be elsewhere, as those of a tensor that is traced are.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if value.is_nested:  # before anything that asks for its shape or its device
        raise TypeError(f"{name}: expected a dense tensor, got a nested tensor")
    if value.layout is not torch.strided:
        raise TypeError(f"{name}: expected layout torch.strided, got {value.layout}")
    if value.is_cuda and not _C.CUDA_BUILT:
        raise ValueError(
            f"{name}: expected device cpu (this build has no CUDA engine), got {value.device}"
        )
    if device is not None and value.device != device:
        raise ValueError(f"{name}: expected device {device}, got {value.device}")
    if value.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: expected device cpu or cuda, got {value.device}")
    return value


_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def require_memory(name: str, value: Tensor):
    """Raises unless a dense tensor's values lie at its address, where the engine reads them."""
    kind = type(value)
    if kind is not Tensor and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        hint = " (see to_local() and full_tensor())" if hasattr(value, "to_local") else ""
        raise TypeError(
            f"{name}: expected a tensor with memory of its own, got a {kind.__name__}{hint}"
        )
    if _is_wrapped(value):
        raise NotImplementedError(f"{name}: torch.func's transforms are not supported")


def require_tensor(name: str, value, device: torch.device | None = None) -> Tensor:
    """The value, if it is a dense tensor on the device whose memory the engine can read."""
    require_dense(name, value, device)
    require_memory(name, value)
    return value


def require_input(name: str, value, function: str, device: torch.device | None = None) -> Tensor:
    """require_dense for a function that may be traced; require_tensor where nobody does so."""
    require_dense(name, value, device)
    if torch.compiler.is_compiling():
        return value
    if not (torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()):
        require_memory(name, value)
    refuse_forward_mode(name, value, function)
    return value


def as_device(device) -> torch.device | None:
    """What PyTorch takes for a device, if there is one; None: its default."""
    try:
        device = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device: expected cpu or cuda, got {device!r}") from error
    if device is not None and device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: expected cpu (PyTorch finds no usable GPU), got {device}")
    return device


def refuse_forward_mode(name: str, value: Tensor, function: str):
    """Operators would drop the tangent of a dual tensor without a word."""
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return
    if forward_ad.unpack_dual(value).tangent is not None:
        raise NotImplementedError(
            f"{name}: {function} has no forward-mode differentiation; use reverse mode"
        )


# Of torch.func, by PyTorch's names; functionalize needs no rule of an operator.
_REFUSED_TRANSFORMS = {
    "Grad": "torch.func's gradients (grad, vjp, jacrev) are not supported; use "
    "torch.autograd.grad or backward()",
    "Jvp": "torch.func's forward-mode differentiation (jvp, jacfwd) is not supported; use reverse "
    "mode: torch.autograd.grad or backward()",
    "Vmap": "torch.vmap is not supported; pass all tokens in one call, in any leading dimensions",
}


def refuse_transforms(function: str):
    """Raises under a transform of torch.func that autograd functions of a call do not know."""
    if torch.compiler.is_compiling():
        return
    for transform in torch._C._functorch.get_interpreter_stack() or ():
        refusal = _REFUSED_TRANSFORMS.get(transform.key().name)
        if refusal is not None:
            raise NotImplementedError(f"{function}: {refusal}")


def refuse_tracing(function: str):
    """Raises where calls are recorded, or transformed, in a way that they do not know."""
    if torch.compiler.is_compiling():
        return
    if torch.jit.is_tracing():
        raise NotImplementedError(
            f"{function}: torch.jit.trace would take this batch's sizes for constants; use "
            "torch.compile or torch.export"
        )
    refuse_transforms(function)


def require_contiguous(name: str, value: Tensor):
    if not value.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {value.stride()}")


def require_aligned(name: str, value: Tensor):
    """Raises if kernels cannot access a GPU's tensor where it is."""
    if value.is_cuda and value.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"{name}: expected an address aligned to {ALIGNMENT} bytes, got {value.data_ptr():#x}"
        )


def require_dtype(name: str, value: Tensor, dtype: torch.dtype, reason: str = ""):
    if value.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}{reason}, got {value.dtype}")


def require_shape(name: str, value: Tensor, shape: tuple[int, ...], letters: str):
    if tuple(value.shape) != tuple(shape):
        raise ValueError(
            f"{name}: expected shape {letters} = {list(shape)}, got {list(value.shape)}"
        )


def dense(value: Tensor) -> Tensor:
    """The tensor, or a copy of it, contiguous and aligned as kernels load it."""
    value = value.contiguous().resolve_neg()
    if value.is_cuda and value.data_ptr() % ALIGNMENT:
        return value.clone()
    return value


def _multiple_of_8(name: str, size: int, letter: str):
    if size < 8 or size % 8:
        raise ValueError(f"{name}: expected {letter} to be a multiple of 8, got {size}")


def check_default(x, choices: Tensor, name: str):
    """What the default workspace takes its shapes from. choices: [..., K], called `name`."""
    require_tensor("x", x)
    as_dtype("x", x.dtype)
    if x.dim() < 1:
        raise ValueError("x: expected shape [..., H], got []")
    _multiple_of_8("x", x.shape[-1], "H")
    if choices.dim() != x.dim() or choices.shape[-1] < 1:
        leading = "".join(f"{size}, " for size in x.shape[:-1])
        raise ValueError(
            f"{name}: expected shape [{leading}K] with K >= 1, got {list(choices.shape)}"
        )


def check_x(x, workspace) -> Tensor:
    """x as [T, H]."""
    require_tensor("x", x, workspace.device)
    as_dtype("x", x.dtype)
    require_dtype("x", x, workspace.dtype, " (the workspace's dtype)")
    if x.dim() < 1 or x.shape[-1] != workspace.hidden_size:
        raise ValueError(
            f"x: expected shape [..., H] with the workspace's H = {workspace.hidden_size}, got "
            f"{list(x.shape)}"
        )
    return x.reshape(-1, workspace.hidden_size)


def check_topk_idx(
    topk_idx, leading: torch.Size, workspace, names: ArgumentNames = MOE_NAMES
) -> Tensor:
    """topk_idx as int64 [T, K] (int32 may stay on a GPU). The engine checks the ids themselves."""
    require_tensor(names.topk_idx, topk_idx, workspace.device)
    as_dtype(names.topk_idx, topk_idx.dtype, (torch.int64, torch.int32))
    require_shape(names.topk_idx, topk_idx, (*leading, workspace.topk), "[..., K]")
    routes = topk_idx.reshape(-1, workspace.topk)
    return dense(routes if routes.is_cuda else routes.to(torch.int64))


def _check_topk_weight(value, leading: torch.Size, workspace, names: ArgumentNames) -> Tensor:
    require_tensor(names.topk_weight, value, workspace.device)
    require_dtype(names.topk_weight, value, torch.float32)
    require_shape(names.topk_weight, value, (*leading, workspace.topk), "[..., K]")
    return dense(value.reshape(-1, workspace.topk))


def _check_routed(weights, workspace, names: ArgumentNames):
    hidden, dtype = workspace.hidden_size, workspace.dtype
    for name, weight in zip((names.gate, names.up, names.down), weights, strict=True):
        require_tensor(name, weight, workspace.device)
        require_dtype(name, weight, dtype, " (the dtype of x)")
    gate, up, down = weights
    if gate.dim() != 3 or gate.shape[2] != hidden:
        raise ValueError(
            f"{names.gate}: expected shape [El, I, H] with H = {hidden}, got {list(gate.shape)}"
        )
    experts, intermediate, _ = gate.shape
    _multiple_of_8(names.gate, intermediate, "I")
    require_shape(names.up, up, (experts, intermediate, hidden), "[El, I, H]")
    require_shape(names.down, down, (experts, hidden, intermediate), "[El, H, I]")
    return dense(gate), dense(up), dense(down)


def _check_shared(shared, leading: torch.Size, workspace, names: ArgumentNames):
    hidden, dtype = workspace.hidden_size, workspace.dtype
    *weights, scale = shared
    if all(weight is None for weight in weights):
        if scale is not None:
            raise ValueError(f"{names.shared_scale}: given without a shared expert's weights")
        return None
    weight_names = (names.shared_gate, names.shared_up, names.shared_down)
    for name, weight in zip(weight_names, weights, strict=True):
        require_tensor(name, weight, workspace.device)
        require_dtype(name, weight, dtype, " (the dtype of x)")
    gate, up, down = weights
    if gate.dim() != 2 or gate.shape[1] != hidden:
        raise ValueError(
            f"{names.shared_gate}: expected shape [I_s, H] with H = {hidden}, got "
            f"{list(gate.shape)}"
        )
    intermediate = gate.shape[0]
    _multiple_of_8(names.shared_gate, intermediate, "I_s")
    require_shape(names.shared_up, up, (intermediate, hidden), "[I_s, H]")
    require_shape(names.shared_down, down, (hidden, intermediate), "[H, I_s]")
    if scale is not None:
        scale = _check_shared_scale(scale, leading, workspace, names.shared_scale)
    return SharedTensors(dense(gate), dense(up), dense(down), scale)


def _check_shared_scale(scale, leading: torch.Size, workspace, name: str) -> Tensor:
    require_tensor(name, scale, workspace.device)
    require_dtype(name, scale, torch.float32)
    if tuple(scale.shape) not in (tuple(leading), (*leading, 1)):
        raise ValueError(
            f"{name}: expected shape {list(leading)} or {[*leading, 1]}, got {list(scale.shape)}"
        )
    return dense(scale.reshape(-1))


def check_layer(
    x, topk_weight, routed, shared, workspace, names: ArgumentNames = MOE_NAMES
) -> LayerTensors:
    """All inputs of a pass but the routing.

    Args:
      routed: (gate, up, down).
      shared: (gate, up, down, scale), all None without a shared expert.
    """
    tokens = check_x(x, workspace)
    leading = x.shape[:-1]
    weight = _check_topk_weight(topk_weight, leading, workspace, names)
    routed = _check_routed(routed, workspace, names)
    shared = _check_shared(shared, leading, workspace, names)
    return LayerTensors(dense(tokens), weight, *routed, shared)


def check_num_experts(num_experts) -> int | None:
    """None or an int >= 1."""
    return as_integer("num_experts", num_experts, 1, MAX_SIZE, optional=True)


def check_swiglu_limit(limit) -> float:
    """The C API's form: 0 is "no clamp"."""
    return as_positive_number("swiglu_limit", limit, optional=True) or 0.0
