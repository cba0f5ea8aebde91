"""The peer: the same layer as good PyTorch code for a CPU.

Routes are sorted by expert once, tokens are gathered once, each expert is three matrix products
(oneDNN, which uses AVX-512 BF16 or AMX where the machine has them) around silu(gate) * up, and one
index_add combines. Autograd supplies the backward.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from mok_torch.functional import SharedExpert


def expert(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """One SwiGLU expert: x [N, H] -> [N, H]."""
    return F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)


def torch_moe(
    x: Tensor, topk_idx: Tensor, topk_weight: Tensor, weights: tuple, shared: SharedExpert | None
) -> Tensor:
    """x [T, H], topk_idx and topk_weight [T, K], weights of all E experts -> [T, H]."""
    flat = topk_idx.flatten()
    order = torch.argsort(flat)
    rows_of_expert = torch.bincount(flat, minlength=weights[0].shape[0]).tolist()
    token = order // topk_idx.shape[1]
    rows = x.index_select(0, token).split(rows_of_expert)
    outputs = [
        expert(own_rows, *own_weights)
        for own_rows, *own_weights in zip(rows, *(w.unbind() for w in weights), strict=True)
        if len(own_rows)
    ]
    weighted = torch.cat(outputs) * topk_weight.flatten()[order].unsqueeze(1)
    out = torch.zeros(x.shape, dtype=torch.float32)
    if shared is not None:
        out = expert(x, shared.w_gate, shared.w_up, shared.w_down).float()
    return out.index_add(0, token, weighted).to(x.dtype)
