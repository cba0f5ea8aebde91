"""functional.moe whose backward adds the weights' gradients to their main_grad.

Wherever moe_cuda.py does not apply. The operators of custom_ops.py write to nothing but their
outputs, so this backward does not call theirs but does the same, with other outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mok_torch import _C, custom_ops
from mok_torch.checks import LayerTensors
from mok_torch.main_grads import MainGrads, main_grads_of, tell_trainer
from mok_torch.passes import LayerGrads, WeightGrads, new_grads
from mok_torch.workspace import DEFAULT_HANDLE, reporting_errors_of, workspace_of_handle

_NUM_WEIGHTS = 6


def moe(inputs: Sequence, swiglu_limit: float | None, weights: Sequence[Tensor | None]) -> Tensor:
    """The layer's output. Collective.

    Args:
      inputs: of the operator moe_forward, without swiglu_limit.
      weights: the six that have the main_grads; in `inputs` they may be cast.
    """
    x, topk_idx, topk_weight, *others, handle, plan = inputs
    *casts, scale = others
    casts = [cast if cast is None else cast.detach() for cast in casts]
    settings = (handle, plan, swiglu_limit)
    return _IntoMainGrads.apply(settings, casts, x, topk_idx, topk_weight, scale, *weights)


class _IntoMainGrads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, settings, casts, x, topk_idx, topk_weight, scale, *weights):
        out, *saved = custom_ops.moe_forward(x, topk_idx, topk_weight, *casts, scale, *settings)
        ctx.save_for_backward(x, topk_weight, *casts, scale, *saved)
        ctx.set_materialize_grads(False)
        ctx.settings, ctx.weights = settings, weights
        # Keeps a workspace alive that its owner drops before the backward.
        handle = settings[0]
        ctx.workspace = workspace_of_handle(handle) if handle != DEFAULT_HANDLE else None
        return out

    @staticmethod
    def backward(ctx, d_out):
        nothing = (None,) * (6 + _NUM_WEIGHTS)
        if d_out is None:
            return nothing
        with reporting_errors_of(ctx.workspace, _C.OP_BACKWARD):  # hooks may run, and fail
            tensors = custom_ops.saved_tensors_of(ctx)  # once: a checkpoint's are there once
        inputs, saved = tensors[:9], tensors[9:]
        x, topk_weight, *_, scale = inputs

        def new_grads(layer: LayerTensors) -> LayerGrads:
            return grads_into(main_grads_of(ctx.weights, layer.x.dtype), layer.tensors())

        with torch.no_grad():
            grads = custom_ops.run_backward((d_out, *inputs), saved, ctx.settings, new_grads)
        d_scale = None if scale is None else grads.shared_scale.view(scale.shape)
        d_inputs = (grads.x.view(x.shape), None, grads.topk_weight.view(topk_weight.shape), d_scale)
        gradients = (*d_inputs, *tell_trainer(ctx.weights))
        if torch.is_grad_enabled():  # create_graph
            gradients = custom_ops.NoDoubleBackward.apply(gradients, d_out, *inputs)
        return None, None, *gradients


def grads_into(buffers: MainGrads, tensors: Sequence[Tensor | None]) -> LayerGrads:
    """Outputs of a backward that adds to the buffers; tensors: as LayerTensors.tensors()."""
    routed = WeightGrads(*buffers[:3], accumulate=True)
    return new_grads(tensors, routed, WeightGrads(*buffers[3:], accumulate=True))
