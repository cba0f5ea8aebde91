"""CUDA graphs, torch.compile and the host's cost of a call, on one GPU."""

import statistics
import time

import pytest
import torch

from mok_torch import MoELayer, functional
from mok_torch.functional import moe
from mok_torch.self_test import Case
from mok_torch.test_support import routed_batch

CASE = Case("graph", (512,), hidden=256, intermediate=128, experts=8, topk=2, shared=64)


def inputs():
    batch = routed_batch(CASE, torch.bfloat16)
    tensors = (batch.x, batch.topk_idx, batch.topk_weight, *batch.weights, *batch.shared[:3])
    x, idx, weight, w_gate, w_up, w_down, *shared = (t.detach().cuda() for t in tensors)
    return x, idx, weight, w_gate, w_up, w_down, functional.SharedExpert(*shared)


def routings():
    generator = torch.Generator().manual_seed(1)
    shape = (512, 2)
    balanced = torch.arange(1024).view(shape) % 8
    skewed = torch.where(torch.rand(shape, generator=generator) < 0.9, 3, balanced)
    return {
        "balanced": balanced,
        "skewed": skewed,
        "one expert": torch.full(shape, 7),
        "empty": torch.full(shape, -1),
        "holes": torch.where(torch.rand(shape, generator=generator) < 0.5, -1, balanced),
    }


@pytest.mark.parametrize("macrobatch", [None, 256])
def test_a_graph_replayed_with_other_routings_equals_eager(macrobatch):
    x, idx, weight, *weights, shared = inputs()
    config = functional.MoKConfig(macrobatch_size=macrobatch)
    workspace = functional.create_workspace(
        config, device="cuda", num_local_tokens=512, hidden_size=256, topk=2
    )
    arguments = {"shared": shared, "workspace": workspace, "config": config}
    moe(x, idx, weight, *weights, **arguments)  # warms up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe(x, idx, weight, *weights, **arguments)
    for name, routing in routings().items():
        idx.copy_(routing)
        weight.uniform_()
        x.normal_()
        for _ in range(3):
            graph.replay()
        assert torch.equal(out, moe(x, idx, weight, *weights, **arguments)), name
    # An invalid id of a replay is found as well.
    idx[5, 1] = 8
    graph.replay()
    with pytest.raises(ValueError, match="rank 0, token 5, k 1: expected -1 to 7, got 8"):
        workspace.check()
    idx[5, 1] = 0
    graph.replay()
    assert torch.equal(out, moe(x, idx, weight, *weights, **arguments))


def test_a_graph_of_a_layer_outlives_growth():
    layer = MoELayer(
        256, 128, 8, 2, shared_intermediate_size=64, dtype=torch.bfloat16, device="cuda"
    ).eval()
    x = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
        layer(torch.randn(5000, 256, dtype=torch.bfloat16, device="cuda"))  # a larger workspace
        x.normal_()
        graph.replay()
        assert torch.equal(out, layer(x))


def test_growth_during_a_capture_is_refused():
    x, idx, weight, *weights, _ = inputs()
    workspace = functional.create_workspace(
        device="cuda", num_local_tokens=100, hidden_size=256, topk=2
    )
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="cannot be made or grown while a CUDA graph"):
        with torch.cuda.graph(graph):
            moe(x, idx, weight, *weights, workspace=workspace)


def test_compiled_equals_eager():
    x, idx, weight, *weights, shared = inputs()
    compiled = torch.compile(moe, fullgraph=True, dynamic=True)
    for tokens in (512, 100, 37):
        arguments = (x[:tokens], idx[:tokens], weight[:tokens], *weights)
        with torch.no_grad():
            out = compiled(*arguments, shared=shared)
            assert torch.equal(out, moe(*arguments, shared=shared))


def test_compiled_layer():
    layer = MoELayer(256, 128, 8, 2, dtype=torch.bfloat16, device="cuda").eval()
    x = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        expected = layer(x)
        out = torch.compile(layer, fullgraph=True)(x)
    assert torch.allclose(out.float(), expected.float(), atol=1e-3, rtol=2e-2)


def host_microseconds(function, calls: int = 200) -> float:
    """Median time that one call keeps the host, the GPU never being waited for."""
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(times)


def test_the_host_is_kept_briefly(capsys):
    """The limits are above what hosts of virtual machines were seen to take (README.md)."""
    x, idx, weight, *weights, shared = inputs()
    workspace = functional.get_workspace(
        device="cuda", num_local_tokens=512, hidden_size=256, topk=2
    )
    schedule = functional.build_schedule(workspace, None, idx, num_local_experts=8)
    common = (None, workspace, schedule)
    explicit = (x, weight, *shared[:3], *weights)
    engine, calls = workspace.engine, []
    queue = engine.forward
    engine.forward = lambda *call: calls.append(call)
    out, context = functional.forward(*common, *explicit)
    engine.forward = queue
    functional.forward(*common, *explicit)  # fills the scratch of the launches, whose out is alive
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, *weights, *shared[:3])]
    leaf_shared = functional.SharedExpert(*leaves[5:])

    def moe_of_leaves():
        return moe(leaves[0], idx, *leaves[1:5], shared=leaf_shared)

    d_out, differentiated = torch.ones_like(out), moe_of_leaves()
    measured = {
        "launch": (lambda: queue(*calls[0]), 30),
        "schedule": (
            lambda: functional.build_schedule(workspace, None, idx, num_local_experts=8),
            80,
        ),
        "forward": (lambda: functional.forward(*common, *explicit), 60),
        "backward": (lambda: functional.backward(*common, context, d_out, *explicit), 200),
        "moe": (lambda: moe(x, idx, weight, *weights, shared=shared), 140),
        "differentiated moe": (moe_of_leaves, 250),
        "its backward": (
            lambda: torch.autograd.grad(differentiated, leaves, d_out, retain_graph=True),
            600,
        ),
    }
    times = {name: host_microseconds(call) for name, (call, _) in measured.items()}
    with capsys.disabled():
        print("\nhost:", ", ".join(f"{name} {time:.1f} us" for name, time in times.items()))
    for name, (_, limit) in measured.items():
        assert times[name] < limit, name
