"""Wrong arguments: the error names the argument on every rank, and the next correct call works."""

import dataclasses
import threading

import pytest
import torch
from torch.autograd import forward_ad

from mok_torch import _C, InProcessGroup, RankTimeoutError, ResourceExhaustedError, functional
from mok_torch.functional import MoKConfig, SharedExpert, create_workspace, moe
from mok_torch.self_test import Case, run_on_ranks
from mok_torch.test_support import routed_batch

CASE = Case("errors", (12,), hidden=32, intermediate=24, experts=4, shared=16, scaled_shared=True)
# Long enough for a loaded machine; only tests of timeouts wait for it, with a short one.
CONFIG = MoKConfig(timeout_seconds=30)


def make_arguments(dtype=torch.bfloat16):
    batch = routed_batch(CASE, dtype)
    names = ("x", "topk_idx", "topk_weight", "w_gate", "w_up", "w_down")
    values = (batch.x, batch.topk_idx, batch.topk_weight, *batch.weights)
    arguments = {name: value.detach() for name, value in zip(names, values, strict=True)}
    shared = SharedExpert(*(tensor.detach() for tensor in batch.shared))
    return arguments | {"shared": shared}


def shared_with(**changes):
    return lambda arguments: {"shared": arguments["shared"]._replace(**changes)}


# name: (what to change, the exception, a part of its text)
WRONG = {
    "x list": (lambda a: {"x": a["x"].tolist()}, TypeError, "x: expected a torch.Tensor, got list"),
    "x dtype": (lambda a: {"x": a["x"].half()}, TypeError, "x: expected torch.bfloat16"),
    "x hidden": (lambda a: {"x": a["x"][:, :24]}, ValueError, "x: expected shape|w_gate: expected"),
    "x device": (
        lambda a: {"x": a["x"].to("meta")},
        ValueError,
        "x: expected device cpu or cuda, got meta",
    ),
    "x layout": (lambda a: {"x": a["x"].to_sparse()}, TypeError, "x: expected layout"),
    "x scalar": (lambda a: {"x": a["x"][0, 0]}, ValueError, "x: expected at least 1 dim"),
    "idx dtype": (
        lambda a: {"topk_idx": a["topk_idx"].float()},
        TypeError,
        "topk_idx: expected torch.int64 or torch.int32, got torch.float32",
    ),
    "idx tokens": (
        lambda a: {"topk_idx": a["topk_idx"][:5]},
        ValueError,
        r"topk_idx: expected shape .* = \[12, 2\], got \[5, 2\]",
    ),
    "topk_idx without K": (
        lambda a: {"topk_idx": a["topk_idx"][:, 0]},
        ValueError,
        r"topk_idx: expected shape .*\[12, (K|2)\].*, got \[12\]",
    ),
    "idx high": (
        lambda a: {"topk_idx": torch.where(a["topk_idx"] == 3, 2**40, a["topk_idx"])},
        ValueError,
        r"topk_idx: rank 0, token .* expected an expert id in \[-1, 4\), got 1099511627776",
    ),
    "idx low": (
        lambda a: {"topk_idx": a["topk_idx"] - 2},
        ValueError,
        r"topk_idx: rank 0, token .* got -2",
    ),
    "weight dtype": (
        lambda a: {"topk_weight": a["topk_weight"].bfloat16()},
        TypeError,
        "topk_weight: expected torch.float32, got torch.bfloat16",
    ),
    "weight shape": (
        lambda a: {"topk_weight": a["topk_weight"][:, :1]},
        ValueError,
        "topk_weight: expected shape",
    ),
    "gate dtype": (
        lambda a: {"w_gate": a["w_gate"].float()},
        TypeError,
        r"w_gate: expected torch.bfloat16 \(the dtype of x\), got torch.float32",
    ),
    "gate dimensions": (
        lambda a: {"w_gate": a["w_gate"][0]},
        ValueError,
        "w_gate: expected at least 3 dimensions",
    ),
    "gate hidden": (lambda a: {"w_gate": a["w_gate"][..., :24]}, ValueError, "w_gate: .* H = 32"),
    "up swapped": (lambda a: {"w_up": a["w_down"]}, ValueError, r"w_up: .* \[\d, 24, 32\], got"),
    "down experts": (lambda a: {"w_down": a["w_down"][:1]}, ValueError, "w_down: expected shape"),
    "intermediate": (
        lambda a: (
            {name: a[name][:, :20] for name in ("w_gate", "w_up")}
            | {"w_down": a["w_down"][..., :20]}
        ),
        ValueError,
        "w_gate: expected I to be a multiple of 8, got 20",
    ),
    "no weights": (lambda a: {"w_up": None}, TypeError, "w_up: expected a torch.Tensor, got None"),
    "shared type": (lambda a: {"shared": a["w_gate"]}, TypeError, "shared: expected a SharedExp"),
    "shared partial": (shared_with(w_up=None), TypeError, "shared.w_up: expected a torch.Tensor"),
    "shared dtype": (
        lambda a: {"shared": a["shared"]._replace(w_down=a["shared"].w_down.float())},
        TypeError,
        "shared.w_down: expected torch.bfloat16",
    ),
    "shared shape": (
        lambda a: {"shared": a["shared"]._replace(w_down=a["shared"].w_down.mT)},
        ValueError,
        "shared.w_down: expected shape",
    ),
    "scale dtype": (
        lambda a: {"shared": a["shared"]._replace(scale=a["shared"].scale.bfloat16())},
        TypeError,
        "shared.scale: expected torch.float32",
    ),
    "scale shape": (
        lambda a: {"shared": a["shared"]._replace(scale=a["shared"].scale[1:])},
        ValueError,
        r"shared.scale: expected shape \[12\] or \[12, 1\], got \[11\]",
    ),
    "limit": (lambda a: {"swiglu_limit": -1.0}, ValueError, "swiglu_limit: expected a number > 0"),
    "limit type": (lambda a: {"swiglu_limit": "1"}, TypeError, "swiglu_limit: expected a number"),
    "num_experts": (
        lambda a: {"num_experts": 5},
        ValueError,
        r"num_experts: expected 5, the ranks' w_gate.shape\[0\] add up to 4|ranks disagree on num_",
    ),
    "num_experts type": (lambda a: {"num_experts": "5"}, TypeError, "num_experts: expected an int"),
    "config": (lambda a: {"config": 3}, TypeError, "config: expected a MoKConfig or None, got int"),
    "tokens": (
        lambda a: (
            {name: a[name].repeat(2, 1) for name in ("x", "topk_idx", "topk_weight")}
            | {"shared": None}
        ),
        ValueError,
        "x: expected at most 12 tokens, the num_local_tokens of the workspace, got 24",
    ),
}


@pytest.mark.parametrize("wrong", WRONG.keys() - {"tokens"})
@pytest.mark.parametrize("own_workspace", [False, True])
def test_wrong_argument_on_one_rank(wrong, own_workspace):
    change, error, text = WRONG[wrong]
    arguments = make_arguments()
    workspace = None
    if own_workspace:
        workspace = create_workspace(None, None, num_local_tokens=12, hidden_size=32, topk=2)
    expected = moe(**arguments, workspace=workspace)
    with pytest.raises(error, match=text):
        moe(**(arguments | change(arguments)), workspace=workspace)
    assert torch.equal(moe(**arguments, workspace=workspace), expected)


def _rank_arguments(rank):
    arguments = make_arguments()
    for name in ("w_gate", "w_up", "w_down"):
        arguments[name] = arguments[name][2 * rank : 2 * rank + 2]
    return arguments


def test_wrong_argument_of_one_of_two_ranks():
    """One pair of ranks lives through all mistakes; each is followed by a correct call."""

    def on_rank(member, rank):
        workspace = create_workspace(CONFIG, member, num_local_tokens=12, hidden_size=32, topk=2)
        arguments = _rank_arguments(rank)
        expected = moe(**arguments, workspace=workspace)
        for index, (name, (change, error, text)) in enumerate(WRONG.items()):
            wrong_rank = index % 2
            text = text.replace("rank 0", f"rank {wrong_rank}")
            changes = change(arguments)
            if name in ("x dtype", "x hidden"):
                error, text = (TypeError if name == "x dtype" else ValueError), "x: expected"
            if name == "x layout":
                text = "x: expected layout"
            calls = arguments | changes if rank == wrong_rank else arguments
            with pytest.raises(error, match=text) as caught:
                moe(**calls, workspace=workspace)
            if rank != wrong_rank and "expert id" not in text:
                assert f"rank {wrong_rank}" in str(caught.value)
            assert torch.equal(moe(**arguments, workspace=workspace), expected)

    run_on_ranks(on_rank, 2)


def test_wrong_output_gradient_of_one_of_two_ranks():
    def on_rank(member, rank):
        workspace = create_workspace(CONFIG, member, num_local_tokens=12, hidden_size=32, topk=2)
        arguments = _rank_arguments(rank)
        shared = arguments.pop("shared")
        schedule = functional.build_schedule(
            workspace, None, arguments["topk_idx"], num_local_experts=2
        )
        tensors = [arguments[n] for n in ("x", "topk_weight")] + [*shared[:3]]
        tensors += [arguments[n] for n in ("w_gate", "w_up", "w_down")]
        out, context = functional.forward(None, workspace, schedule, *tensors)

        def backward(d_out):
            return functional.backward(None, workspace, schedule, context, d_out, *tensors)

        expected = backward(out)
        with pytest.raises(ValueError, match=r"d_output: expected shape of x = \[12, 32\]"):
            backward(out[:3] if rank == 1 else out)
        with pytest.raises(TypeError, match=r"d_output: expected torch.bfloat16"):
            backward(out.float() if rank == 0 else out)
        # A recomputation meets nobody: its error comes with the others' backward.
        if rank == 1:
            with pytest.raises(ValueError, match="x: expected the schedule's 12 tokens, got 5"):
                functional.recompute_forward_context(
                    None, workspace, schedule, *(t[:5] for t in tensors[:2]), *tensors[2:]
                )
        else:
            with pytest.raises(ValueError, match="rank 1: x: expected the schedule's 12 tokens"):
                backward(out)
        for one, other in zip(backward(out), expected, strict=True):
            assert torch.equal(one, other)

    run_on_ranks(on_rank, 2)


DISAGREEMENTS = {
    "intermediate": (
        lambda a: (
            {name: a[name][:, :16] for name in ("w_gate", "w_up")}
            | {"w_down": a["w_down"][..., :16]}
        ),
        "intermediate size of the routed experts: rank 0 has 24, rank 1 has 16",
    ),
    "shared expert": (lambda a: {"shared": None}, "of the shared expert: rank 0 has 16, rank 1"),
    "swiglu_limit": (lambda a: {"swiglu_limit": 7.0}, "swiglu_limit: rank 0 has .*, rank 1 has 7"),
}


@pytest.mark.parametrize("field", DISAGREEMENTS)
def test_ranks_that_disagree_about_the_layer(field):
    change, text = DISAGREEMENTS[field]

    def on_rank(member, rank):
        workspace = create_workspace(CONFIG, member, num_local_tokens=12, hidden_size=32, topk=2)
        arguments = _rank_arguments(rank)
        expected = moe(**arguments, workspace=workspace)
        wrong = arguments | change(arguments) if rank == 1 else arguments
        with pytest.raises(ValueError, match=text):
            moe(**wrong, workspace=workspace)
        assert torch.equal(moe(**arguments, workspace=workspace), expected)

    run_on_ranks(on_rank, 2)


@pytest.mark.parametrize("grad_mode", [True, False])
def test_ranks_that_disagree_about_differentiation(grad_mode):
    """Else the rank that wants gradients would wait in its backward for one that has none."""

    def on_rank(member, rank):
        workspace = create_workspace(CONFIG, member, num_local_tokens=12, hidden_size=32, topk=2)
        arguments = _rank_arguments(rank)
        x = arguments["x"].requires_grad_()

        def call(differentiated):
            if grad_mode:  # and the input requires no gradient
                inputs = arguments | {"x": x if differentiated else x.detach()}
                return moe(**inputs, workspace=workspace)
            with torch.set_grad_enabled(differentiated):
                return moe(**arguments, workspace=workspace)

        expected = call(True)
        with pytest.raises(ValueError, match=r"disagree on differentiation .* has no, rank 1 has"):
            call(rank == 1)
        assert torch.equal(call(False), expected)
        call(True).sum().backward()
        assert x.grad.isfinite().all()

    run_on_ranks(on_rank, 2)


def test_a_gradient_of_any_input_is_enough():
    """Which inputs have one is each rank's own affair."""

    def on_rank(member, rank):
        workspace = create_workspace(CONFIG, member, num_local_tokens=12, hidden_size=32, topk=2)
        arguments = _rank_arguments(rank)
        leaf = arguments["x" if rank == 0 else "w_down"].requires_grad_()
        moe(**arguments, workspace=workspace).sum().backward()
        assert leaf.grad.isfinite().all()

    run_on_ranks(on_rank, 2)


class _UnforeseenError(Exception):
    pass


@pytest.mark.parametrize(
    "error, kind, text",
    [
        (NotImplementedError("no"), NotImplementedError, "rank 1: no"),
        (MemoryError("none"), ResourceExhaustedError, "rank 1: none"),
        (UnicodeError("text"), ValueError, "rank 1: text"),
        (RuntimeError("plain"), RuntimeError, "rank 1: plain"),
        (_UnforeseenError("who"), RuntimeError, "rank 1: _UnforeseenError: who"),
    ],
    ids=lambda value: getattr(type(value), "__name__", None),
)
def test_the_class_of_an_error_on_other_ranks(error, kind, text):
    def on_rank(member, rank):
        workspace = create_workspace(CONFIG, member, num_local_tokens=12, hidden_size=32, topk=2)
        arguments = _rank_arguments(rank)
        if rank == 1:
            with pytest.raises(type(error)) as caught, workspace.reporting_errors(_C.OP_SCHEDULE):
                raise error
            assert caught.value is error
        else:
            with pytest.raises(kind) as caught:
                moe(**arguments, workspace=workspace)
            assert type(caught.value) is kind and str(caught.value) == text
        moe(**arguments, workspace=workspace)

    run_on_ranks(on_rank, 2)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"hidden_size": 40}, "hidden_size: ranks disagree: 32 on ranks 0, 1; 40 on rank 2"),
        ({"topk": 1}, "topk: ranks disagree: 2 on ranks 0, 1; 1 on rank 2"),
        ({"dtype": torch.float32}, "dtype: ranks disagree: torch.bfloat16 on ranks 0, 1; torch.f"),
        ({"hidden_size": 33}, "hidden_size: expected a multiple of 8, got 33"),
        ({"num_local_tokens": -1}, "num_local_tokens: expected 0 to"),
        ({"device": "meta"}, "device: expected cpu"),
        ({"device": "garbage"}, "device: expected cpu or cuda, got 'garbage'"),
        ({"device": None}, "device: expected cpu or cuda, got None"),
    ],
)
@pytest.mark.parametrize("create", [functional.create_workspace, functional.get_workspace])
def test_ranks_that_disagree_about_the_workspace(create, options, text):
    def on_rank(member, rank):
        correct = {"num_local_tokens": 12, "hidden_size": 32, "topk": 2}
        with pytest.raises(ValueError, match=text):
            create(CONFIG, member, **(correct | options if rank == 2 else correct))
        assert create(CONFIG, member, **correct).ep_size == 3

    run_on_ranks(on_rank, 3)


class _BadConfig(MoKConfig):
    """A config that breaks in a way that no check foresees, with an error that does not pickle."""

    @property
    def timeout_seconds(self):
        class LocalError(Exception):
            pass

        raise LocalError("surprise")


@pytest.mark.parametrize("create", [functional.create_workspace, functional.get_workspace])
def test_an_unforeseen_error_reaches_every_rank(create):
    bad = object.__new__(_BadConfig)

    def on_rank(member, rank):
        correct = {"num_local_tokens": 12, "hidden_size": 32, "topk": 2}
        with pytest.raises(Exception, match="surprise") as caught:
            create(bad if rank == 1 else CONFIG, member, **correct)
        if rank == 0:
            assert str(caught.value) == "rank 1: LocalError: surprise"
        assert create(CONFIG, member, **correct).ep_size == 2

    run_on_ranks(on_rank, 2)


def test_forward_mode_on_one_rank_raises_on_every_rank():
    def on_rank(member, rank):
        workspace = create_workspace(CONFIG, member, num_local_tokens=12, hidden_size=32, topk=2)
        arguments = _rank_arguments(rank)
        expected = moe(**arguments, workspace=workspace)
        wrong = arguments
        if rank == 1:
            x = arguments["x"]
            wrong = arguments | {"x": forward_ad.make_dual(x, torch.ones_like(x))}
        with pytest.raises(NotImplementedError, match="forward-mode"):
            moe(**wrong, workspace=workspace)
        assert torch.equal(moe(**arguments, workspace=workspace), expected)

    with forward_ad.dual_level():
        run_on_ranks(on_rank, 2)


def test_a_rank_that_does_not_come_is_named():
    config = dataclasses.replace(CONFIG, timeout_seconds=0.5)
    done = threading.Barrier(3)

    def on_rank(member, rank):
        workspace = create_workspace(config, member, num_local_tokens=12, hidden_size=32, topk=2)
        if rank == 1:
            done.wait(60)
            return
        arguments = _rank_arguments(rank)
        for _ in range(2):  # the workspace remembers
            with pytest.raises(RankTimeoutError, match=r"1"):
                moe(**arguments, workspace=workspace)
        with pytest.raises(RankTimeoutError, match=r"1"):
            workspace.check()
        assert not workspace.is_usable()
        done.wait(60)

    run_on_ranks(on_rank, 3)


def test_a_rank_that_comes_too_late_is_told_at_once():
    config = dataclasses.replace(CONFIG, timeout_seconds=2)
    given_up = threading.Event()

    def on_rank(member, rank):
        workspace = create_workspace(config, member, num_local_tokens=12, hidden_size=32, topk=2)
        arguments = _rank_arguments(rank)
        moe(**arguments, workspace=workspace)
        if rank == 0:
            with pytest.raises(RankTimeoutError, match=r"^rank 0, .* missing rank 1"):
                moe(**arguments, workspace=workspace)
            given_up.set()
            with pytest.raises(RankTimeoutError, match=r"^rank 0, "):
                workspace.check()
            return
        given_up.wait(60)
        # Without waiting: the engine, which would wait, has other words.
        told = (
            r"^rank 1 came too late: rank 0 gave up at [\d:]{8}, after waiting for 2 s in a .*: ra"
        )
        for call in (arguments, arguments | {"x": None}):
            with pytest.raises(RankTimeoutError, match=told):
                moe(**call, workspace=workspace)
        assert not workspace.is_usable()

    run_on_ranks(on_rank, 2)


@pytest.mark.parametrize("fuses", [False, True])
def test_a_hook_that_fails_in_the_backward_of_one_rank_reaches_every_rank(fuses):
    def on_rank(member, rank):
        workspace = create_workspace(CONFIG, member, num_local_tokens=12, hidden_size=32, topk=2)
        arguments = _rank_arguments(rank)
        arguments["x"].requires_grad_()
        for name in ("w_gate", "w_up", "w_down"):
            arguments[name].requires_grad_().main_grad = torch.zeros_like(arguments[name])

        def call():
            return moe(**arguments, workspace=workspace, gradient_accumulation_fusion=fuses)

        def unpack(tensor):
            if rank == 1:
                raise OSError("no such file")
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            out = call()
        error = OSError if rank == 1 else RuntimeError
        with pytest.raises(error, match=r"^(rank 1: OSError: )?no such file"):
            out.sum().backward()
        call().sum().backward()

    run_on_ranks(on_rank, 2)


def test_a_broken_cached_workspace_is_replaced():
    config = dataclasses.replace(CONFIG, timeout_seconds=0.3)
    late = threading.Event()

    def on_rank(member, rank):
        shapes = {"num_local_tokens": 12, "hidden_size": 32, "topk": 2}
        broken = functional.get_workspace(config, member, **shapes)
        arguments = _rank_arguments(rank)
        if rank == 0:
            with pytest.raises(RankTimeoutError):
                moe(**arguments, workspace=broken)
            late.set()
        late.wait(60)
        workspace = functional.get_workspace(CONFIG, member, **shapes)
        assert workspace is not broken
        return moe(**arguments, workspace=workspace)

    run_on_ranks(on_rank, 2)


def test_a_rank_that_does_not_create_its_workspace_is_named():
    group = InProcessGroup(2)
    config = dataclasses.replace(CONFIG, timeout_seconds=0.2)
    with pytest.raises(RankTimeoutError, match=r"rank 0: ranks \[1\] of the in-process group"):
        create_workspace(config, group.member(0), num_local_tokens=1, hidden_size=8, topk=1)


def test_a_handle_is_no_workspace():
    workspace = create_workspace(None, None, num_local_tokens=12, hidden_size=32, topk=2)
    arguments = make_arguments()
    with pytest.raises(TypeError, match="workspace: expected a Workspace or None, got int"):
        moe(**arguments, workspace=workspace.handle)
