"""Random walks: layers and batches of all sizes take turns on the same workspaces.

Each step has another layer, batch, configuration, workspace and, on a GPU, stream; backwards come
late, in any order and more than once. Whatever came before, bits are those of a workspace of its
own.
"""

from __future__ import annotations

import contextlib
import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from mok_torch import functional
from mok_torch.functional import MoKConfig
from mok_torch.test_support import as_bits

BF16 = torch.bfloat16
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class RandomLayer:
    """Weights of a layer of random sizes."""

    def __init__(self, draw: random.Random, device: str):
        self.hidden, intermediate = 8 * draw.randint(1, 40), 8 * draw.randint(1, 40)
        self.experts, self.topk = draw.randint(1, 12), draw.randint(1, 6)
        shared = 8 * draw.randint(0, 20)
        self.swiglu_limit = draw.choice([None, None, 0.5])

        def weight(*shape: int) -> Tensor:
            values = torch.randn(shape) * shape[-1] ** -0.5
            return values.to(device, BF16).requires_grad_()

        up = (self.experts, intermediate, self.hidden)
        self.routed = [weight(*up), weight(*up), weight(self.experts, self.hidden, intermediate)]
        self.shared = None
        if shared:
            wide = (shared, self.hidden)
            down = weight(self.hidden, shared)
            self.shared = functional.SharedExpert(weight(*wide), weight(*wide), down, None)

    @property
    def weights(self) -> list[Tensor]:
        return self.routed + ([] if self.shared is None else list(self.shared[:3]))


class RandomBatch:
    """Tokens of a layer, and the gradient of its output."""

    def __init__(self, draw: random.Random, layer: RandomLayer, device: str):
        count = draw.choice([0, 1, 17, 127, 128, 129, draw.randint(0, 700)])
        self.layer = layer
        self.x = torch.randn(count, layer.hidden).to(device, BF16).requires_grad_()
        routes = torch.randint(-1, layer.experts, (count, layer.topk))
        if draw.random() < 0.2:
            routes.fill_(draw.randrange(-1, layer.experts))
        self.topk_idx = routes.to(device)
        self.topk_weight = torch.rand(count, layer.topk).to(device).requires_grad_()
        self.d_out = torch.randn(count, layer.hidden).to(device, BF16)

    def forward(self, workspace, config: MoKConfig | None = None) -> Tensor:
        layer = self.layer
        tensors = (self.x, self.topk_idx, self.topk_weight, *layer.routed)
        options = {"shared": layer.shared, "swiglu_limit": layer.swiglu_limit}
        return functional.moe(*tensors, workspace=workspace, config=config, **options)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        leaves = [self.x, self.topk_weight, *self.layer.weights]
        return torch.autograd.grad(out, leaves, self.d_out, retain_graph=True)


class LiveForward(NamedTuple):
    """A forward whose backward may still come, and what that has to give."""

    batch: RandomBatch
    out: Tensor
    gradients: tuple[Tensor, ...]


def assert_equal(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]):
    for index, (tensor, other) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(as_bits(tensor), as_bits(other)), index


def random_config(draw: random.Random) -> MoKConfig:
    return MoKConfig(
        fwd_num_comm_sms=draw.choice([0, 0, 3]),
        bwd_num_comm_sms=draw.choice([0, 0, 2]),
        minibatch_size=draw.choice([None, 1, 256]),
        macrobatch_size=draw.choice([None, -1, 1, 300]),
        num_threads=draw.choice([None, 1, 3]),
        num_sms=draw.choice([None, 20, 77]),
    )


def new_workspace(layer: RandomLayer, device: str, num_tokens: int):
    return functional.create_workspace(
        device=device, num_local_tokens=num_tokens, hidden_size=layer.hidden, topk=layer.topk
    )


class Walk:
    """The workspaces that all steps share, and the forwards that wait for their backward."""

    def __init__(self, draw: random.Random, device: str):
        self.draw, self.device = draw, device
        self.layers = [RandomLayer(draw, device) for _ in range(3)]
        self.shared = [new_workspace(layer, device, 400) for layer in self.layers]
        self.live: list[LiveForward] = []
        self.streams = [None] if device == "cpu" else [None, torch.cuda.Stream()]

    def step(self):
        if self.live and self.draw.random() < 0.5:
            forward = self.live.pop(self.draw.randrange(len(self.live)))
            for _ in range(self.draw.choice([1, 1, 2])):
                assert_equal(forward.batch.backward(forward.out), forward.gradients)
        else:
            self.live.append(self.forward())

    def forward(self) -> LiveForward:
        index = self.draw.randrange(len(self.layers))
        batch = RandomBatch(self.draw, self.layers[index], self.device)
        own = new_workspace(batch.layer, self.device, max(1, len(batch.x)))
        expected = batch.forward(own)
        gradients = batch.backward(expected)
        fits = len(batch.x) <= self.shared[index].num_local_tokens
        # None: the default workspace, which grows.
        workspace = self.draw.choice([None, self.shared[index]]) if fits else None
        if self.draw.random() < 0.15:
            self.shared[index].poison()
        with self.on_a_stream():
            out = batch.forward(workspace, random_config(self.draw))
        assert_equal((out,), (expected,))
        return LiveForward(batch, out, gradients)

    @contextlib.contextmanager
    def on_a_stream(self):
        stream = self.draw.choice(self.streams)
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(6))
def test_what_came_before_changes_no_bit(seed, device):
    torch.manual_seed(seed)
    walk = Walk(random.Random(seed), device)
    for _ in range(25):
        walk.step()
