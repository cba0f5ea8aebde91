"""A MoE layer whose backward adds the experts' gradients straight into parameter.main_grad.

Ordinary autograd writes a gradient for every weight and the trainer adds it to its buffer: of the
experts' gradients that is several times the bytes that the layer's kernel would move if it added
them itself, and rounds them to the weights' dtype in between. Here the kernel accumulates in fp32
over a microbatch's tokens and adds the sum to the buffer with one rounding, to the buffer's dtype.
An expert without tokens leaves its part of the buffer alone, bit for bit, without reading it.

The contract, as trainers in the style of Megatron-LM have it (gradient_buffer.py):

  parameter.main_grad                fp32, or the dtype that the layer computes in; of the
                                     parameter's shape, contiguous, 16-byte aligned; one dtype for
                                     the routed and one for the shared experts. Read in the
                                     backward, so that it may be another buffer in every step.
  parameter.grad_added_to_main_grad  if the parameter has this attribute, the backward sets it and
                                     hands autograd a gradient of the right shape that means
                                     nothing, so that the trainer's hooks run, in autograd's thread.
                                     The hook has to drop it. Without the attribute autograd gets no
                                     gradient, and no hook runs.

It is built on the explicit calls of mok_torch.functional, which take the buffers as arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mok_torch import MoELayer, functional
from mok_torch.fan_out import fan_out
from mok_torch.groups import DistributedGroup, SingleRank
from mok_torch.layer import PRECISIONS, output_gate
from mok_torch.router import count_routes


@dataclasses.dataclass
class _Call:
    """What a forward and its backward share but do not differentiate.

    parameters: routed gate, up, down, then those of the shared expert, or nothing.
    """

    workspace: functional.Workspace
    config: functional.MoKConfig
    schedule: functional.Schedule
    swiglu_limit: float | None
    parameters: Sequence[nn.Parameter]

    def arguments(self, x: Tensor, router_weights: Tensor, scale: Tensor | None) -> tuple:
        """Of functional.forward, and what follows the context in functional.backward's."""
        weights = [parameter.detach().to(x.dtype) for parameter in self.parameters]
        shared = weights[3:] or [None] * 3
        positional = (x, router_weights, *shared, *weights[:3], self.swiglu_limit)
        return positional, {"shared_scale": scale}


class _MoEIntoMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: _Call, x, router_weights, scale, *parameters):
        positional, keywords = call.arguments(x, router_weights, scale)
        del parameters  # call.parameters: here they are only for autograd to see
        out, context = functional.forward(
            call.config, call.workspace, call.schedule, *positional, **keywords
        )
        ctx.call, ctx.has_scale = call, scale is not None
        ctx.context = dataclasses.replace(context, ring=None)
        # The ring goes through autograd, so that checkpointing and offloading can drop it.
        given = (x, router_weights) if scale is None else (x, router_weights, scale)
        ctx.save_for_backward(*given, *context.ring)
        ctx.ring_type = type(context.ring)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        call = ctx.call
        x, router_weights, *saved = ctx.saved_tensors
        scale = saved.pop(0) if ctx.has_scale else None
        positional, keywords = call.arguments(x, router_weights, scale)
        context = dataclasses.replace(ctx.context, ring=ctx.ring_type(*saved))
        d_x, d_router_weights, *others = functional.backward(
            call.config,
            call.workspace,
            call.schedule,
            context,
            d_out,
            *positional,
            **keywords,
            main_grads=functional.MainGrads(*(p.main_grad for p in call.parameters)),
        )
        ctx.context.kept_macrobatches = context.kept_macrobatches
        d_scale = others[-1] if ctx.has_scale else None
        placeholders = [_tell_trainer(parameter) for parameter in call.parameters]
        return None, d_x, d_router_weights, d_scale, *placeholders


def _tell_trainer(parameter: nn.Parameter) -> Tensor | None:
    """Marks the parameter; what autograd gets as its gradient."""
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    return torch.empty_like(parameter)


def _group_argument(layer: MoELayer):
    """What the layer was given as its group."""
    if isinstance(layer.group, SingleRank):
        return None
    return layer.group.group if isinstance(layer.group, DistributedGroup) else layer.group


class MainGradMoE(nn.Module):
    """A MoELayer's parameters and arithmetic, with gradients of the experts in main_grad.

    The router's weight, and the gate's of the shared expert, have ordinary gradients. The bits of
    out and of the inputs' gradients are those of the layer.

    Args:
      layer: without gradient_block.
      max_tokens_per_rank: of any call; collective, as the forward and its backward are.
    """

    def __init__(self, layer: MoELayer, max_tokens_per_rank: int):
        super().__init__()
        if layer.gradient_block is not None:
            raise ValueError(f"layer: expected gradient_block None, got {layer.gradient_block}")
        self.layer = layer
        self._workspace = functional.get_workspace(
            layer.config,
            _group_argument(layer),
            device=layer.router.weight.device,
            num_local_tokens=max_tokens_per_rank,
            hidden_size=layer.hidden_size,
            topk=layer.router.config.top_k,
            dtype=PRECISIONS[layer.precision],
        )

    def main_grad_parameters(self) -> list[nn.Parameter]:
        """Parameters that need a main_grad before the first backward."""
        modules = [self.layer.experts]
        if self.layer.shared_expert is not None:
            modules.append(self.layer.shared_expert)
        return [p for module in modules for p in (module.w_gate, module.w_up, module.w_down)]

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of tokens x [..., H], in x's shape and dtype. Collective."""
        layer = self.layer
        if x.dim() == 0 or x.shape[-1] != layer.hidden_size:
            raise ValueError(f"x: expected shape [..., {layer.hidden_size}], got {list(x.shape)}")
        with torch.autocast(x.device.type, enabled=False):
            # Three users, as in the layer: their gradients are added with one rounding.
            tokens, to_router, to_gate = fan_out(x.reshape(-1, layer.hidden_size), 3)
            routes = layer.router(to_router)
            # For layer.update_expert_bias().
            layer.expert_load.copy_(count_routes(routes.topk_idx, layer.num_experts))
            shared, scale = layer.shared_expert, None
            if shared is not None and shared.gate_weight is not None:
                scale = output_gate(to_gate, shared.gate_weight)
            schedule = functional.build_schedule(
                self._workspace,
                layer.config,
                routes.topk_idx,
                num_local_experts=layer.experts.w_gate.shape[0],
                num_experts=layer.num_experts,
            )
            parameters = self.main_grad_parameters()
            call = _Call(self._workspace, layer.config, schedule, layer.swiglu_limit, parameters)
            out = _MoEIntoMainGrad.apply(
                call, tokens.to(PRECISIONS[layer.precision]), routes.topk_weight, scale, *parameters
            )
            return out.to(x.dtype).reshape(x.shape)
