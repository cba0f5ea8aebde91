"""Gradients on two GPUs, errors between a forward and its backward, collectives beside a pass.

Needs two GPUs of compute capability 9.0 that are linked: with fewer everything fails. With more the
gradients are compared on 3, 4 and 8 as well.
"""

import time

import pytest
import torch
import torch.distributed as dist

from mok_torch import functional
from mok_torch.functional import MainGrads, MoKConfig, build_schedule, moe
from mok_torch.process_test_support import (
    BF16,
    CASES,
    RANK_COUNTS,
    RANKS,
    make_workspace,
    over_ranks,
    rank_inputs,
    run_processes,
)
from mok_torch.self_test import Case, run_layer
from mok_torch.test_support import as_bits, assert_matches_reference, routed_batch

TRAINING_CASES = (
    *CASES[:3],
    Case("clamped", (70, 9), hidden=256, intermediate=264, experts=3, shared=40, swiglu_limit=0.5),
    Case("experts of one rank only", (100, 60), experts=1, topk=1, shared=40, scaled_shared=True),
)
LEAVES = ("x", "topk_weight", "w_gate", "w_up", "w_down")
SHARED = ("shared_gate", "shared_up", "shared_down", "shared_scale")


def rank_leaves(case, rank):
    """moe's arguments of a rank, leaves by name, and its part of d_out."""
    (x, idx, *others), shared = rank_inputs(case, rank)
    given = dict(zip(LEAVES, (x, *others), strict=True))
    if shared is not None:
        given |= {n: t for n, t in zip(SHARED, shared, strict=True) if t is not None}
        shared = functional.SharedExpert(*(given.get(name) for name in SHARED))
    for tensor in given.values():
        tensor.requires_grad_()
    begin = sum(case.tokens[:rank])
    d_out = routed_batch(case, BF16).d_out[begin : begin + case.tokens[rank]].cuda()
    return idx, given, shared, d_out


def gradients_of(case, rank, workspace, config):
    """out and gradients through autograd, several times; the same bits every time."""
    idx, given, shared, d_out = rank_leaves(case, rank)
    results = []
    for _ in range(3):
        out = moe(
            given["x"],
            idx,
            *(given[name] for name in LEAVES[1:]),
            shared=shared,
            workspace=workspace,
            config=config,
            swiglu_limit=case.swiglu_limit,
            num_experts=case.experts,
        )
        for _ in range(2):  # the second recomputes what the first may have overwritten
            gradients = torch.autograd.grad(
                out, list(given.values()), d_out, retain_graph=True, allow_unused=True
            )
            named = {f"d_{n}": g for n, g in zip(given, gradients, strict=True) if g is not None}
            results.append({"out": out.detach()} | named)
    for result in results[1:]:
        assert result.keys() == results[0].keys()
        for name, tensor in result.items():
            assert torch.equal(as_bits(tensor), as_bits(results[0][name])), name
    return results[0]


def save_gradients(rank, folder):
    for index, two in enumerate(TRAINING_CASES):
        case = over_ranks(two, dist.get_world_size())
        workspace = make_workspace(case)
        settings = (
            MoKConfig(),
            MoKConfig(fwd_num_comm_sms=4, bwd_num_comm_sms=4),
            MoKConfig(macrobatch_size=128, minibatch_size=128),
            MoKConfig(macrobatch_size=-1, num_sms=60),
        )
        runs = [gradients_of(case, rank, workspace, config) for config in settings]
        workspace.check()
        dist.barrier()
        workspace.poison()
        dist.barrier()
        runs.append(gradients_of(case, rank, workspace, settings[0]))
        workspace.check()
        for number, run in enumerate(runs):
            for name, tensor in run.items():
                same = torch.equal(as_bits(tensor), as_bits(runs[0][name]))
                assert same, f"{case.name}, run {number}: {name}"
        torch.save({n: t.cpu() for n, t in runs[0].items()}, f"{folder}/run.{index}.{rank}")


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_gradients_of_several_gpus_are_those_of_one(tmp_path, ranks):
    """Bit for bit, and within the limits of float64. The shared expert's are of a rank's tokens."""
    run_processes(save_gradients, tmp_path, "nccl", ranks)
    for index, case in enumerate(TRAINING_CASES):
        results = [torch.load(tmp_path / f"run.{index}.{rank}") for rank in range(ranks)]
        batch = routed_batch(case, BF16)
        one = run_layer(case, batch, "cuda")
        assert_matches_reference(case, BF16, rounded=True, check_rows=False, device="cuda")
        for name in ("out", "d_x", "d_topk_weight", "d_w_gate", "d_w_up", "d_w_down"):
            whole = torch.cat([result[name] for result in results])
            assert torch.equal(as_bits(whole), as_bits(one[name])), f"{case.name}: {name}"
        if case.scaled_shared:
            whole = torch.cat([result["d_shared_scale"] for result in results])
            assert torch.equal(whole, one["d_shared_scale"]), case.name
        if case.shared:
            for name in ("d_shared_gate", "d_shared_up", "d_shared_down"):
                total = sum(result[name].float() for result in results)
                error = (total - one[name].float()).norm() / one[name].float().norm()
                assert error < 1e-2, f"{case.name}: {name}"


def add_main_gradients(rank, folder):
    """The explicit backward into fp32 buffers adds what autograd's gradients are."""
    del folder
    case = CASES[0]
    workspace = make_workspace(case)
    idx, given, shared, d_out = rank_leaves(case, rank)
    tensors = [given[name].detach() for name in LEAVES]
    own = [tensor.detach() for tensor in shared[:3]]
    x, weight, *routed = tensors
    arguments, scale = (x, weight, *own, *routed), shared.scale.detach()
    schedule = build_schedule(workspace, None, idx, num_local_experts=4, num_experts=8)
    common = (None, workspace, schedule)

    def run(**options):
        _, context = functional.forward(*common, *arguments, shared_scale=scale)
        return functional.backward(
            *common, context, d_out, *arguments, shared_scale=scale, **options
        )

    written = run(weight_grad_dtype=torch.float32)
    buffers = [torch.full(g.shape, 0.25, device="cuda") for g in written[2:8]]
    for _ in range(2):
        run(main_grads=MainGrads(*buffers))
    for buffer, gradient in zip(buffers, written[2:8], strict=True):
        assert torch.allclose(buffer, 2 * gradient + 0.25, rtol=1e-6, atol=1e-6)
    misplaced = [torch.empty(b.numel() + 1, device="cuda")[1:].view(b.shape) for b in buffers]
    with pytest.raises(ValueError, match=r"main_grads\.routed_gate: expected an address aligned"):
        run(main_grads=MainGrads(*misplaced))


def test_main_gradients_of_two_gpus(tmp_path):
    run_processes(add_main_gradients, tmp_path)


def fail_between_schedule_and_pass(rank, folder):
    """One rank's forward or backward is refused by its host: the other one does not wait for it."""
    del folder
    for in_backward in (False, True):
        case = CASES[0]
        workspace = make_workspace(case, MoKConfig(timeout_seconds=20))
        idx, given, shared, d_out = rank_leaves(case, rank)
        x, weight, *routed = (given[name].detach() for name in LEAVES)
        arguments = (x, weight, *(t.detach() for t in shared[:3]), *routed)
        schedule = build_schedule(workspace, None, idx, num_local_experts=4, num_experts=8)
        common = (None, workspace, schedule)
        _, context = functional.forward(*common, *arguments)
        functional.backward(*common, context, d_out, *arguments)
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.monotonic()
        call = functional.backward if in_backward else functional.forward
        before = (context, d_out) if in_backward else ()
        if rank == 0:
            wrong = (x, weight.double(), *arguments[2:])
            with pytest.raises(TypeError, match=r"router_weights: expected torch\.float32"):
                call(*common, *before, *wrong)
            with pytest.raises(RuntimeError, match="rank 0 has left this workspace"):
                build_schedule(workspace, None, idx, num_local_experts=4, num_experts=8)
        else:
            call(*common, *before, *arguments)
            with pytest.raises(TypeError, match="rank 0 has left this workspace"):
                workspace.check()
            build_schedule(workspace, None, idx, num_local_experts=4, num_experts=8)
            torch.cuda.synchronize()
        assert not workspace.is_usable()
        assert time.monotonic() - begin < 10
        dist.barrier()


def test_an_error_between_a_schedule_and_its_pass_reaches_the_other_rank(tmp_path):
    run_processes(fail_between_schedule_and_pass, tmp_path)


def reduce_beside_passes(rank, folder):
    """All-reduces on a side stream while passes leave SMs for them; nobody waits for ever."""
    del folder
    case = Case("beside", (2048, 2048), hidden=1024, intermediate=512, experts=8, topk=4)
    workspace = make_workspace(case, MoKConfig(timeout_seconds=20))
    (x, idx, weight, *weights), _ = rank_inputs(case, rank)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, *weights)]
    # NCCL takes up to 32 SMs for an all-reduce over NVLink.
    config = MoKConfig(num_sms=torch.cuda.get_device_properties(rank).multi_processor_count - 36)
    d_out, side = torch.randn_like(x), torch.cuda.Stream()
    buffer = torch.ones(64 << 20, device="cuda")
    expected = None
    for repeat in range(20):
        works = []
        with torch.cuda.stream(side):
            for _ in range(3):
                works.append(dist.all_reduce(buffer, async_op=True))
        if (repeat + rank) % 2:  # the ranks' queues fill in different orders
            time.sleep(0.002)
        out = moe(x, idx, weight, *weights, workspace=workspace, config=config, num_experts=8)
        results = torch.autograd.grad(out, leaves, d_out)
        for work in works:
            work.wait()
        if expected is None:
            expected = results
        assert all(torch.equal(own, other) for own, other in zip(results, expected, strict=True))
    workspace.check()


def test_collectives_beside_passes_that_leave_sms(tmp_path):
    run_processes(reduce_beside_passes, tmp_path, "nccl")


def test_a_layer_on_the_second_gpu():
    """Everything of one rank on cuda:1, whatever the current device."""
    assert torch.cuda.device_count() >= RANKS, "this test needs two GPUs"
    case = Case("second", (200,), shared=40, scaled_shared=True)
    expected = run_layer(case, routed_batch(case, BF16), "cuda:0")
    with torch.cuda.device(0):
        actual = run_layer(case, routed_batch(case, BF16), "cuda:1")
        for name, tensor in expected.items():
            assert torch.equal(as_bits(actual[name]), as_bits(tensor)), name
    batch = routed_batch(case, BF16)
    tensors = [t.detach().to("cuda:1") for t in (batch.x, batch.topk_idx, batch.topk_weight)]
    weights = [t.detach().to("cuda:1") for t in batch.weights]
    with torch.cuda.device(0):  # captures the stream of another device
        moe(*tensors, *weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(1), torch.cuda.graph(graph):
        out = moe(*tensors, *weights)
    with torch.cuda.device(1):
        graph.replay()
    with torch.cuda.device(0):
        assert torch.equal(moe(*tensors, *weights), out)
