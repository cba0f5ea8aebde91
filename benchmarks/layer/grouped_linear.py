"""Products of rows that are sorted by expert: torch._grouped_mm, or cuBLAS once an expert."""

import dataclasses
from typing import Protocol

import torch
from torch import Tensor


@dataclasses.dataclass
class RowGroups:
    """Rows sorted by local expert."""

    counts: list[int]  # of each expert, known to the host
    ends: Tensor  # int32 [El], where each expert's rows end, on the device


def row_groups(counts: Tensor) -> RowGroups:
    """counts: int [El] on the device. Waits for it: the host has to know."""
    return RowGroups(counts.tolist(), counts.cumsum(0).int())


class GroupedLinear(Protocol):
    """C[rows of e] = A[rows of e] W[e]^T for a stack of weights [El, N, K], and its gradients."""

    def forward(self, a: Tensor, groups: RowGroups) -> Tensor: ...

    def input_grad(self, d_c: Tensor, groups: RowGroups) -> Tensor: ...

    def weight_grad(
        self, d_c: Tensor, a: Tensor, groups: RowGroups, total: Tensor | None = None
    ) -> Tensor:
        """Added to total where there is one."""


class TorchGroupedMm:
    """One kernel for all experts."""

    label = "grouped_mm"

    def __init__(self, weight: Tensor):
        self.weight = weight

    def forward(self, a: Tensor, groups: RowGroups) -> Tensor:
        return torch._grouped_mm(a, self.weight.transpose(1, 2), offs=groups.ends)

    def input_grad(self, d_c: Tensor, groups: RowGroups) -> Tensor:
        return torch._grouped_mm(d_c, self.weight, offs=groups.ends)

    def weight_grad(
        self, d_c: Tensor, a: Tensor, groups: RowGroups, total: Tensor | None = None
    ) -> Tensor:
        grad = torch._grouped_mm(d_c.T, a, offs=groups.ends)
        return grad if total is None else total.add_(grad)


class CublasLoop:
    """One product for each expert, written in place."""

    label = "cublas"

    def __init__(self, weight: Tensor):
        self.weight = weight

    def forward(self, a: Tensor, groups: RowGroups) -> Tensor:
        out = a.new_empty(len(a), self.weight.shape[1])
        parts = zip(a.split(groups.counts), self.weight, out.split(groups.counts), strict=True)
        for a_e, weight, out_e in parts:
            torch.mm(a_e, weight.T, out=out_e)
        return out

    def input_grad(self, d_c: Tensor, groups: RowGroups) -> Tensor:
        out = d_c.new_empty(len(d_c), self.weight.shape[2])
        parts = zip(d_c.split(groups.counts), self.weight, out.split(groups.counts), strict=True)
        for d_e, weight, out_e in parts:
            torch.mm(d_e, weight, out=out_e)
        return out

    def weight_grad(
        self, d_c: Tensor, a: Tensor, groups: RowGroups, total: Tensor | None = None
    ) -> Tensor:
        out = torch.empty_like(self.weight) if total is None else total
        parts = zip(d_c.split(groups.counts), a.split(groups.counts), out, strict=True)
        for d_e, a_e, out_e in parts:
            if total is None:
                torch.mm(d_e.T, a_e, out=out_e)
            else:
                out_e.addmm_(d_e.T, a_e)
        return out
