"""What the peers do between matrix products: fused row kernels in Triton, plain PyTorch elsewhere.

The router weight multiplies h, before the down projection, so that a row needs no weight on its way
back and the weight's gradient is a by-product of the SwiGLU backward: <dh, h>.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of PyTorch
    triton = None

_COLUMNS = 1024  # of a row that one program holds at a time


def use_triton(tensor: Tensor) -> bool:
    """Whether the kernels below run on this tensor; else the same arithmetic in PyTorch."""
    if tensor.is_cuda and triton is None:
        raise RuntimeError("triton is needed on a GPU: unfused row operations would be a straw man")
    return tensor.is_cuda


if triton is not None:

    @triton.jit
    def _gather_kernel(source, index, out, width, block: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        from_row = tl.load(index + row).to(tl.int64)
        for begin in range(0, width, block):
            column = begin + tl.arange(0, block)
            values = tl.load(source + from_row * width + column, mask=column < width)
            tl.store(out + row * width + column, values, mask=column < width)

    @triton.jit
    def _combine_kernel(
        rows, index, base, out, width, topk, has_base: tl.constexpr, block: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * block + tl.arange(0, block)
        inside = column < width
        total = tl.zeros([block], dtype=tl.float32)
        if has_base:
            total += tl.load(base + token * width + column, mask=inside).to(tl.float32)
        for k in range(topk):
            row = tl.load(index + token * topk + k).to(tl.int64)
            if row >= 0:
                total += tl.load(rows + row * width + column, mask=inside).to(tl.float32)
        tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _swiglu_kernel(gate_up, weight, out, width, has_weight: tl.constexpr, block: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        scale = 1.0
        if has_weight:
            scale = tl.load(weight + row)
        for begin in range(0, width, block):
            column = begin + tl.arange(0, block)
            inside = column < width
            g = tl.load(gate_up + row * 2 * width + column, mask=inside).to(tl.float32)
            u = tl.load(gate_up + row * 2 * width + width + column, mask=inside).to(tl.float32)
            h = g * tl.sigmoid(g) * u * scale
            tl.store(out + row * width + column, h.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _swiglu_backward_kernel(
        d_h,
        gate_up,
        weight,
        d_gate_up,
        weighted_h,
        d_weight,
        width,
        has_weight: tl.constexpr,
        block: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        scale = 1.0
        if has_weight:
            scale = tl.load(weight + row)
        partial = tl.zeros([block], dtype=tl.float32)
        for begin in range(0, width, block):
            column = begin + tl.arange(0, block)
            inside = column < width
            at = row * width + column
            at_gate = row * 2 * width + column
            g = tl.load(gate_up + at_gate, mask=inside, other=0.0).to(tl.float32)
            u = tl.load(gate_up + at_gate + width, mask=inside, other=0.0).to(tl.float32)
            d = tl.load(d_h + at, mask=inside, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(g)
            silu = g * sigmoid
            partial += d * silu * u
            d *= scale
            d_gate = d * u * sigmoid * (1 + g * (1 - sigmoid))
            kind = d_gate_up.dtype.element_ty
            tl.store(d_gate_up + at_gate, d_gate.to(kind), mask=inside)
            tl.store(d_gate_up + at_gate + width, (d * silu).to(kind), mask=inside)
            tl.store(weighted_h + at, (silu * u * scale).to(kind), mask=inside)
        if has_weight:
            tl.store(d_weight + row, tl.sum(partial))


def gather_rows(source: Tensor, index: Tensor) -> Tensor:
    """source [S, W], index int [N] -> [N, W]."""
    if not use_triton(source):
        return source.index_select(0, index)
    out = source.new_empty(index.shape[0], source.shape[1])
    if out.numel():
        _gather_kernel[(len(index),)](source, index, out, source.shape[1], block=_COLUMNS)
    return out


def combine_rows(rows: Tensor, index: Tensor, base: Tensor | None = None) -> Tensor:
    """Sums rows[index[t, k]] over k where index >= 0, and base[t], in fp32.

    rows [N, W], index int [T, K], base [T, W] or None -> [T, W] of rows' dtype.
    """
    tokens, topk = index.shape
    width = rows.shape[1]
    if not use_triton(rows):
        start = rows.new_zeros(tokens, width) if base is None else base
        total = start.float()
        token, k = torch.nonzero(index >= 0, as_tuple=True)
        return total.index_add(0, token, rows[index[token, k]].float()).to(rows.dtype)
    out = rows.new_empty(tokens, width)
    grid = (tokens, triton.cdiv(width, _COLUMNS))
    given = rows if base is None else base
    _combine_kernel[grid](rows, index, given, out, width, topk, base is not None, block=_COLUMNS)
    return out


def swiglu(gate_up: Tensor, weight: Tensor | None = None) -> Tensor:
    """gate_up [N, 2I], weight fp32 [N] or None -> weight * silu(gate) * up, [N, I]."""
    width = gate_up.shape[1] // 2
    if not use_triton(gate_up):
        gate, up = gate_up.float().chunk(2, dim=1)
        h = F.silu(gate) * up
        return (h if weight is None else h * weight.unsqueeze(1)).to(gate_up.dtype)
    out = gate_up.new_empty(len(gate_up), width)
    if len(gate_up):
        scale = gate_up if weight is None else weight
        _swiglu_kernel[(len(gate_up),)](
            gate_up, scale, out, width, weight is not None, block=_COLUMNS
        )
    return out


def swiglu_backward(
    d_h: Tensor, gate_up: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """d_h: the gradient of swiglu's result, [N, I].

    Returns:
      The gradient of gate_up [N, 2I]; swiglu's result [N, I] again; the weight's gradient fp32 [N].
    """
    width = d_h.shape[1]
    if not use_triton(gate_up):
        gate, up = gate_up.float().chunk(2, dim=1)
        d, sigmoid = d_h.float(), gate.sigmoid()
        silu = gate * sigmoid
        d_weight = None if weight is None else (d * silu * up).sum(1)
        scale = 1.0 if weight is None else weight.unsqueeze(1)
        d = d * scale
        d_gate = d * up * sigmoid * (1 + gate * (1 - sigmoid))
        d_gate_up = torch.cat([d_gate, d * silu], dim=1).to(d_h.dtype)
        return d_gate_up, (silu * up * scale).to(d_h.dtype), d_weight
    d_gate_up, weighted_h = torch.empty_like(gate_up), torch.empty_like(d_h)
    d_weight = None if weight is None else torch.empty_like(weight)
    if len(gate_up):
        scale, d_scale = (gate_up, gate_up) if weight is None else (weight, d_weight)
        _swiglu_backward_kernel[(len(gate_up),)](
            d_h, gate_up, scale, d_gate_up, weighted_h, d_scale, width, weight is not None,
            block=_COLUMNS,
        )  # fmt: skip
    return d_gate_up, weighted_h, d_weight
