"""Data parallelism around expert parallelism: which parameter belongs to whom, and who adds what.

The ranks form a grid [dp, ep]. A row of it, `ep` ranks of one NVLink domain, shares the experts of
every MoE layer; the rows are replicas of each other.

    parameters                 held by                    each rank's gradient     to be added over
    experts                    one rank of every row      complete for its row     its column, dp
    all others, router and     every rank                 of its own tokens        all ranks
    shared expert included

With a loss that is a sum over the rank's tokens, divided by the number of tokens of *all* ranks,
every one of these additions is a plain sum, and the result is the gradient of the mean. DDP and
FSDP divide by the number of ranks unless told otherwise; both are told otherwise here.
"""

import contextlib
import dataclasses
import os
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from examples.data_parallel.model import Model


@dataclasses.dataclass(frozen=True)
class Meshes:
    """The ranks as a grid and in a row.

    Attributes:
      grid: dimensions "dp" and "ep"; the ranks of an EP group are consecutive.
      line: all of them, one dimension.
    """

    grid: DeviceMesh
    line: DeviceMesh

    @property
    def expert_group(self) -> dist.ProcessGroup:
        """For MoELayer(group=...)."""
        return self.grid["ep"].get_group()

    @property
    def replica_group(self) -> dist.ProcessGroup:
        """The ranks with the same experts."""
        return self.grid["dp"].get_group()


def make_meshes(device_type: str, ep_size: int) -> Meshes:
    """Collective. ep_size: ranks that share the experts; they have to reach each other's memory."""
    ranks = dist.get_world_size()
    if ranks % ep_size:
        raise ValueError(f"ep_size: expected a divisor of {ranks} ranks, got {ep_size}")
    grid = init_device_mesh(device_type, (ranks // ep_size, ep_size), mesh_dim_names=("dp", "ep"))
    return Meshes(grid, init_device_mesh(device_type, (ranks,), mesh_dim_names=("rank",)))


class Strategy(Protocol):
    """How the gradients are added up.

    Attributes:
      module: the model to call.
    """

    module: nn.Module

    def microbatch(self, is_last: bool) -> contextlib.AbstractContextManager:
        """Surrounds forward and backward of one microbatch of a step."""

    def finish(self) -> None:
        """After the last backward of a step: now all gradients are complete. Collective."""


def _sum_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook: the sum, where the default is the mean."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class Replicated:
    """DistributedDataParallel: every rank holds all parameters but the other ranks' experts."""

    def __init__(self, model: Model, meshes: Meshes):
        self._experts = model.expert_parameters()
        self._replica_group = meshes.replica_group
        experts = set(self._experts)
        names = [name for name, parameter in model.named_parameters() if parameter in experts]
        # Buffers are equal on all ranks (the router's bias) or each rank's own (expert_load).
        names += [name for name, _ in model.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        self.module = DistributedDataParallel(model, process_group=meshes.line.get_group())
        self.module.register_comm_hook(meshes.line.get_group(), _sum_bucket)

    def microbatch(self, is_last: bool) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if is_last else self.module.no_sync()

    def finish(self) -> None:
        sum_over_group([parameter.grad for parameter in self._experts], self._replica_group)


class Sharded:
    """FSDP2: replicated parameters are sharded over all ranks, experts over the replicas.

    shard_experts: False: FSDP leaves the experts alone, each replica keeps its rank's experts
    whole, as with Replicated.
    """

    def __init__(self, model: Model, meshes: Meshes, shard_experts: bool):
        self.module = model
        self._experts = [] if shard_experts else model.expert_parameters()
        self._replica_group = meshes.replica_group
        experts = set(model.expert_parameters())
        for block in model.blocks:
            # First the block, over all ranks: it takes the router and the shared expert too, which
            # the MoE layer uses inside the block's forward. Then the layer, over the replicas, with
            # what is left: its experts.
            fully_shard(block, mesh=meshes.line, ignored_params=experts)
            if shard_experts:
                others = set(block.moe.parameters()) - experts
                fully_shard(block.moe, mesh=meshes.grid["dp"], ignored_params=others)
        fully_shard(model, mesh=meshes.line, ignored_params=experts)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo knows no other

    def microbatch(self, is_last: bool) -> contextlib.AbstractContextManager:
        self.module.set_requires_gradient_sync(is_last)
        return contextlib.nullcontext()

    def finish(self) -> None:
        sum_over_group([parameter.grad for parameter in self._experts], self._replica_group)


def sum_over_group(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Replaces the tensors by their sums over the ranks of the group. Collective."""
    if not tensors or dist.get_world_size(group) == 1:
        return
    total = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(total, group=group)
    for tensor, piece in zip(tensors, total.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(piece.view_as(tensor))


def launch_kernels_in_order() -> None:
    """Before a process uses its GPU: the GPU starts kernels in the order of their launches.

    A MoE pass of several ranks and an NCCL kernel both wait for their peers. Were the one first on
    one GPU and the other first on another, each could wait for the other; DDP and FSDP launch in
    the same order on all ranks, but from several streams.
    """
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"


def balance_experts(model: Model, meshes: Meshes, rate: float) -> None:
    """Moves the routers' biases by the load of all ranks. Collective.

    (MoELayer.update_expert_bias alone would add the load over its own group, and the replicas'
    routers would drift apart.)
    """
    for block in model.blocks:
        load = block.moe.expert_load.clone()
        dist.all_reduce(load, group=meshes.line.get_group())
        block.moe.update_expert_bias(rate, load)


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by name, shards put together; of the experts this rank's. Collective."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        is_shard = isinstance(gradient, torch.distributed.tensor.DTensor)
        gradients[name] = gradient.full_tensor() if is_shard else gradient
    return gradients
