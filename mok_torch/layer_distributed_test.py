"""MoELayer over processes: torch.distributed (gloo) and POSIX shared memory."""

import itertools
import os
import weakref

import pytest
import torch
import torch.distributed as dist

from mok_torch import RankTimeoutError
from mok_torch.config import MoKConfig
from mok_torch.full_state import full_state_dict
from mok_torch.layer import MoELayer

HIDDEN, EXPERTS = 32, 5


def make_layer(group=None):
    torch.manual_seed(1)
    return MoELayer(
        HIDDEN, 24, EXPERTS, 2, scoring="sigmoid", shared_intermediate_size=16, group=group
    )


def make_tokens():
    return torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(2))


def spawn(worker, size, folder, *arguments):
    """Runs worker(rank, size, *arguments) in processes with a default process group."""
    arguments = (worker, size, str(folder / "meeting_point"), arguments)
    torch.multiprocessing.spawn(join_and_work, arguments, size)


def join_and_work(rank, worker, size, meeting_point, arguments):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{meeting_point}", rank=rank, world_size=size)
    worker(rank, size, *arguments)
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    # Nothing keeps it and its threads, not even the layers: they may still be there.
    assert group() is None


def check_against_one_rank(rank, size, expected_path):
    expected = torch.load(expected_path)
    layer = make_layer(dist.group.WORLD)
    assert layer.experts.w_gate.shape[0] < EXPERTS
    x = make_tokens().tensor_split(size)[rank].clone().requires_grad_()
    out = layer(x)
    out.sum().backward()
    assert torch.equal(out, expected["out"].tensor_split(size)[rank])
    assert torch.equal(x.grad, expected["d_x"].tensor_split(size)[rank])
    begin, end = layer.owned_experts(rank)
    assert torch.equal(layer.experts.w_down.grad, expected["d_w_down"][begin:end])
    assert torch.equal(layer.global_expert_load(), expected["load"])

    state = layer.full_state_dict()
    assert list(state) == list(expected["state"])
    assert all(torch.equal(state[name], tensor) for name, tensor in expected["state"].items())

    layer.reset_parameters()
    layer.load_full_state_dict(state)
    layer.update_expert_bias(0.5)
    expected_bias = 0.5 * torch.sign(expected["load"].double().mean() - expected["load"])
    assert torch.equal(layer.router.expert_bias, expected_bias.float())


def test_processes_agree_with_one_rank(tmp_path):
    layer = make_layer()
    x = make_tokens().requires_grad_()
    out = layer(x)
    out.sum().backward()
    expected = {
        "out": out.detach(),
        "d_x": x.grad,
        "d_w_down": layer.experts.w_down.grad,
        "load": layer.expert_load,
        "state": layer.full_state_dict(),
    }
    torch.save(expected, tmp_path / "expected.pt")
    spawn(check_against_one_rank, 3, tmp_path, str(tmp_path / "expected.pt"))


def check_wrong_input_raises_everywhere(rank, size):
    del size
    layer = make_layer(dist.group.WORLD)
    x = make_tokens()
    for attempt in range(2):  # before and after there is a workspace
        try:
            layer(x[:, :8] if rank == 1 else x)
        except ValueError as error:
            assert "x: expected shape [..., 32], got [20, 8]" in str(error)
        else:
            raise AssertionError("no error")
        if attempt == 0:
            assert layer(x).isfinite().all()


def test_wrong_input_of_one_process_raises_everywhere(tmp_path):
    spawn(check_wrong_input_raises_everywhere, 2, tmp_path)


def check_compiled_layer(rank, size):
    layer = make_layer(dist.group.WORLD)
    x = make_tokens().tensor_split(size)[rank]
    layer.reserve(len(x))

    def run(function):
        layer.zero_grad()
        own_x = x.clone().requires_grad_()
        out = function(own_x)
        out.sum().backward()
        return [out.detach(), own_x.grad, *(p.grad for p in layer.parameters())]

    plain = run(layer)
    compiled = run(torch.compile(layer, fullgraph=True, backend="aot_eager"))
    assert all(torch.equal(a, b) for a, b in zip(plain, compiled, strict=True))


def test_compiles_over_processes(tmp_path):
    spawn(check_compiled_layer, 2, tmp_path)


def gather_different_layers(rank, size):
    """Layers of equal shapes and names, in another order on one rank."""
    layers = [make_layer(dist.group.WORLD) for _ in range(2)]
    layers[1].reset_parameters()
    for first in range(2):
        with pytest.raises(
            ValueError, match=r"w_gate: the router's weight or bias on rank 1 is not"
        ):
            layers[(first + (rank == 1)) % 2].full_state_dict()
    with pytest.raises(ValueError, match=r"rank 0 0.experts.w_gate of 5 .* rank 1 experts.w_gate"):
        full_state_dict(layers[0] if rank == 1 else torch.nn.Sequential(layers[0]))
    wide = MoELayer(HIDDEN, 32, EXPERTS, 2, group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"rank 0 experts.w_gate .*\[24, 32\].* rank 1 .*\[32,"):
        (wide if rank == 1 else layers[0]).full_state_dict()
    # The ranks are in step.
    assert layers[1].full_state_dict()["experts.w_gate"].shape == (EXPERTS, 24, HIDDEN)


def test_ranks_that_gather_different_layers_are_told_so(tmp_path):
    spawn(gather_different_layers, 2, tmp_path)


def use_a_group_of_others(rank, size):
    part = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="group: this process is not a member"):
            make_layer(part)
    else:
        assert make_layer(part).group.size == 1
    dist.barrier()


def test_a_group_without_this_process_is_refused(tmp_path):
    spawn(use_a_group_of_others, 2, tmp_path)


def come_too_late(rank, size):
    config = MoKConfig(timeout_seconds=3)
    torch.manual_seed(1)
    layer = MoELayer(HIDDEN, 24, EXPERTS, 2, group=dist.group.WORLD, config=config)
    x = make_tokens()
    layer(x)
    if rank == 0:
        with pytest.raises(RankTimeoutError, match="missing rank 1"):
            layer(x)
    dist.barrier()
    if rank == 1:
        with pytest.raises(RankTimeoutError, match=r"^rank 1 came too late: rank 0 gave up at"):
            layer(x)
    dist.barrier()


def test_a_process_that_comes_too_late_is_told_at_once(tmp_path):
    spawn(come_too_late, 2, tmp_path)


MIXED_CALLS = {
    "global_expert_load": lambda layer: layer.global_expert_load(),
    "full_state_dict": lambda layer: layer.full_state_dict(),
    "a first forward, get_workspace or grow": lambda layer: layer(make_tokens()),
}


def call_different_things(rank, size):
    layer = make_layer(dist.group.WORLD)
    for first, second in itertools.permutations(MIXED_CALLS, 2):
        text = f"disagree on the collective call: rank 0 called {first}, rank 1 called {second}"
        with pytest.raises(ValueError, match=text):
            MIXED_CALLS[(first, second)[rank]](layer)
    # Nobody is a meeting behind.
    for call in MIXED_CALLS.values():
        call(layer)


def test_ranks_that_call_different_things_are_told_so(tmp_path):
    spawn(call_different_things, 2, tmp_path)
