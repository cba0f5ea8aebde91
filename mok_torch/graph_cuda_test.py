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
    x, idx, weight, *weights, shared = inputs()
    workspace = functional.get_workspace(
        device="cuda", num_local_tokens=512, hidden_size=256, topk=2
    )
    schedule = functional.build_schedule(workspace, None, idx, num_local_experts=8)
    engine = workspace.engine
    calls = []
    queue = engine.forward
    engine.forward = lambda layer, args: calls.append((layer, args))
    functional.forward(None, workspace, schedule, x, weight, *shared[:3], *weights)
    engine.forward = queue
    # The tensors of that call may be gone; nothing is run over memory that another owns.
    scratch = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
    ring = [torch.empty(1 << 22, dtype=torch.bfloat16, device="cuda") for _ in range(6)]
    layer, args = calls[0]
    args.scratch, args.out = scratch.data_ptr(), ring[5].data_ptr()
    context = args.context
    context.ring_x, context.ring_gate, context.ring_up = (t.data_ptr() for t in ring[:3])
    context.shared_gate, context.shared_up = ring[3].data_ptr(), ring[4].data_ptr()
    launch = host_microseconds(lambda: engine.forward(layer, args))
    explicit = host_microseconds(
        lambda: functional.forward(None, workspace, schedule, x, weight, *shared[:3], *weights)
    )
    whole = host_microseconds(lambda: moe(x, idx, weight, *weights, shared=shared))
    with capsys.disabled():
        print(f"\nhost: launch {launch:.1f} us, explicit forward {explicit:.1f}, moe {whole:.1f}")
    assert launch < 30
