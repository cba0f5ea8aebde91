"""The weights of MoELayer's experts, routed and shared, and which rank holds them."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from mok_torch import functional, ops
from mok_torch.router import position_independent_sigmoid


def expert_range(num_experts: int, size: int, rank: int) -> tuple[int, int]:
    """First expert and end of the experts of a rank; sizes differ by one at most, larger first."""
    share, larger = divmod(num_experts, size)
    begin = rank * share + min(rank, larger)
    return begin, begin + share + (rank < larger)


def output_gate(x: Tensor, gate_weight: Tensor) -> Tensor:
    """sigmoid(gate_weight x) of tokens x [T, H] and gate_weight [1, H], fp32 [T]."""
    return position_independent_sigmoid(ops.router_logits(x, gate_weight)).squeeze(-1)


class Experts(nn.Module):
    """The weights of this rank's routed experts.

    Attributes:
      first: global id of local expert 0.
      w_gate, w_up: parameters [El, I, H].
      w_down: parameter [El, H, I].
    """

    def __init__(self, hidden_size: int, intermediate_size: int, owned: tuple[int, int], **factory):
        super().__init__()
        self.first, end = owned
        local = end - self.first
        self.w_gate = _parameter(local, intermediate_size, hidden_size, **factory)
        self.w_up = _parameter(local, intermediate_size, hidden_size, **factory)
        self.w_down = _parameter(local, hidden_size, intermediate_size, **factory)

    def extra_repr(self) -> str:
        local, intermediate, hidden = self.w_gate.shape
        owned = f"{self.first}..{self.first + local - 1}" if local else "none"
        return f"experts={owned}, hidden_size={hidden}, intermediate_size={intermediate}"


class SharedExpert(nn.Module):
    """The weights of the expert that every token visits; replicated on every rank.

    Attributes:
      w_gate, w_up: parameters [I_s, H].
      w_down: parameter [H, I_s].
      gate_weight: parameter [1, H] of the output gate sigmoid(gate_weight x), or None.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, gated: bool, **factory):
        super().__init__()
        self.w_gate = _parameter(intermediate_size, hidden_size, **factory)
        self.w_up = _parameter(intermediate_size, hidden_size, **factory)
        self.w_down = _parameter(hidden_size, intermediate_size, **factory)
        self.gate_weight = _parameter(1, hidden_size, **factory) if gated else None

    def as_argument(self, x: Tensor, dtype: torch.dtype | None) -> functional.SharedExpert:
        """What functional.moe takes for tokens x [T, H]; dtype: None: the parameters themselves."""
        return functional.SharedExpert(
            cast(self.w_gate, dtype),
            cast(self.w_up, dtype),
            cast(self.w_down, dtype),
            None if self.gate_weight is None else output_gate(x, self.gate_weight),
        )

    def extra_repr(self) -> str:
        intermediate, hidden = self.w_gate.shape
        gated = self.gate_weight is not None
        return f"hidden_size={hidden}, intermediate_size={intermediate}, gated={gated}"


def draw(weight: Tensor, std: float, *identity) -> None:
    """Fills weight from a random sequence that belongs to identity; device and dtype only round."""
    if weight.is_meta:
        return
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little", signed=True))
    values = torch.empty(weight.shape, dtype=torch.float32, device="cpu")
    weight.copy_(values.normal_(std=std, generator=generator))


def cast(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    """dtype: None: the weight itself."""
    return weight if dtype is None else weight.to(dtype)


def _parameter(*shape: int, dtype: torch.dtype, device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
