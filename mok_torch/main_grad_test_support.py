"""Layers whose weights have a main_grad, for tests."""

import torch

from mok_torch.functional import SharedExpert, moe
from mok_torch.self_test import Case
from mok_torch.test_support import routed_batch

BF16 = torch.bfloat16
CASE = Case(
    "main_grad", (40,), hidden=64, intermediate=40, experts=5, shared=24, scaled_shared=True
)


class Inputs:
    """moe's of a case; the weights with a main_grad that holds something already."""

    def __init__(self, case=CASE, weight_dtype=BF16, buffer_dtype=torch.float32, tells=True):
        batch = routed_batch(case, BF16)
        self.x, self.topk_weight = batch.x, batch.topk_weight
        self.topk_idx, self.d_out, self.scale = batch.topk_idx, batch.d_out, batch.shared.scale
        weights = (*batch.weights, *batch.shared[:3])
        self.weights = [torch.nn.Parameter(weight.detach().to(weight_dtype)) for weight in weights]
        for index, weight in enumerate(self.weights):
            weight.main_grad = torch.full(weight.shape, 0.25 * index, dtype=buffer_dtype)
            if tells:
                weight.grad_added_to_main_grad = False

    def moe(self, **options):
        shared = SharedExpert(*self.weights[3:], self.scale)
        options = {"shared": shared, "gradient_accumulation_fusion": True} | options
        return moe(self.x, self.topk_idx, self.topk_weight, *self.weights[:3], **options)

    def main_grads(self):
        return [weight.main_grad for weight in self.weights]
