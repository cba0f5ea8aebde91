"""What is wrong with a layer's arguments: in words of ours, and on every rank where ranks meet."""

import dataclasses
import inspect
import itertools
import time
import warnings

import numpy
import pytest
import torch
import torch.distributed as dist

from mok_torch import MoELayer, MoKConfig, functional
from mok_torch.errors import RankTimeoutError
from mok_torch.groups import DistributedGroup, InProcessGroup, SingleRank
from mok_torch.host_process_test_support import raised_by, run_processes
from mok_torch.self_test import run_on_ranks

SIZES = {"hidden_size": 32, "intermediate_size": 16, "num_experts": 4, "top_k": 2}
CONFIG = MoKConfig(timeout_seconds=60, num_threads=1)  # no test waits for it


class _BrokenConfig(MoKConfig):
    """Not even its timeout can be read."""

    @property
    def timeout_seconds(self):
        raise OSError("no such clock")


# What one rank gives to a constructor that is collective, the exception, and a part of its text.
WRONG = [
    ({"dtype": torch.float16}, TypeError, "dtype: expected .* got torch.float16"),
    ({"device": "garbage"}, ValueError, "device: expected cpu or cuda, got 'garbage'"),
    ({"num_experts": 0}, ValueError, "num_experts: expected 1 to"),
    ({"top_k": 9}, ValueError, "top_k: expected at most the 4 experts"),
    ({"top_k": 1.5}, TypeError, "top_k: expected an int"),
    ({"hidden_size": 12}, ValueError, "hidden_size: expected a multiple of 8, got 12"),
    ({"intermediate_size": "16"}, TypeError, "intermediate_size: expected an int"),
    ({"scoring": "tanh"}, ValueError, "scoring: expected one of"),
    ({"precision": "fp8"}, ValueError, "precision: expected None or one of"),
    ({"config": {}}, TypeError, "config: expected a MoKConfig, got dict"),
    ({"config": object.__new__(_BrokenConfig)}, OSError, "no such clock"),
    ({"swiglu_limit": -1.0}, ValueError, "swiglu_limit: expected a number > 0"),
    ({"gradient_block": 0}, ValueError, "gradient_block: expected 1 to"),
    ({"shared_gate": True}, ValueError, "shared_gate needs a shared expert"),
    ({"max_tokens_per_rank": -5}, ValueError, "max_tokens_per_rank: expected 0 to .*, got -5"),
    ({"hidden_size": 40}, ValueError, "hidden_size: ranks disagree"),
]

# What both ranks give to a constructor, what only one of them gives, and what the error says of it
# and of the other one.
DIFFERENT = [
    ({}, {"hidden_size": 40}, "hidden_size", "40", "32"),
    ({}, {"intermediate_size": 24}, "intermediate_size", "24", "16"),
    ({}, {"num_experts": 6}, "num_experts", "6", "4"),
    ({}, {"top_k": 1}, "top_k", "1", "2"),
    ({}, {"scoring": "sigmoid"}, "scoring", "'sigmoid'", "'softmax'"),
    ({}, {"norm_topk_prob": False}, "norm_topk_prob", "False", "True"),
    ({}, {"routed_scaling_factor": 2}, "routed_scaling_factor", "2.0", "1.0"),
    ({"topk_group": 1}, {"n_group": 2}, "n_group", "2", "1"),
    ({"n_group": 2}, {"topk_group": 2}, "topk_group", "2", "1"),
    ({}, {"expert_bias": True}, "expert_bias", "True", "False"),
    ({}, {"shared_intermediate_size": 8}, "shared_intermediate_size", "8", "0"),
    ({"shared_intermediate_size": 8}, {"shared_gate": True}, "shared_gate", "True", "False"),
    ({}, {"swiglu_limit": 7}, "swiglu_limit", "7.0", "None"),
    ({}, {"gradient_block": 4}, "gradient_block", "4", "None"),
    ({}, {"gradient_accumulation_fusion": True}, "gradient_accumulation_fusion", "True", "False"),
    ({}, {"dtype": torch.bfloat16}, "dtype", "torch.bfloat16", "torch.float32"),
    ({}, {"precision": "bf16"}, "precision", "'bf16'", "'fp32'"),
]


def check_constructors(group, rank):
    """Mistakes of ranks in turn; each is followed by a constructor that works."""
    begin = time.monotonic()
    options = SIZES | {"group": group, "config": CONFIG, "max_tokens_per_rank": 8}
    for (wrong, kind, text), size in zip(WRONG, itertools.cycle((8, 9))):
        wrong_rank = size % 2
        error = raised_by(MoELayer, **(options | (wrong if rank == wrong_rank else {})))
        if rank == wrong_rank or "ranks disagree" in text:
            assert isinstance(error, kind), repr(error)
        else:
            assert isinstance(error, RuntimeError if kind is OSError else kind), repr(error)
            text = f"^rank {wrong_rank}: .*{text}"
        with pytest.raises(type(error), match=text):
            raise error
        layer = MoELayer(**(options | {"max_tokens_per_rank": size}))
        assert layer._workspace.num_local_tokens >= size
    assert time.monotonic() - begin < 60
    layer(torch.randn(8, 32)).sum().backward()


def check_different_layers(group, rank):
    """Ranks that give different arguments are told so by the first meeting, then build again."""
    options = SIZES | {"group": group, "config": CONFIG}
    x = torch.randn(4, 32)
    for number, (common, odd, name, odd_value, value) in enumerate(DIFFERENT):
        odd_rank = number % 2
        given = options | common | (odd if rank == odd_rank else {})
        values = (odd_value, value) if odd_rank == 0 else (value, odd_value)
        text = f"{name}: ranks disagree: {values[0]} on rank 0; {values[1]} on rank 1"
        tokens = torch.randn(4, given["hidden_size"])
        layer = MoELayer(**given)
        for meet in (
            lambda given=given: MoELayer(**given, max_tokens_per_rank=8),
            lambda layer=layer: layer.reserve(8),
            lambda layer=layer, tokens=tokens: layer(tokens),
        ):
            error = raised_by(meet)
            assert type(error) is ValueError and str(error) == text, repr(error)
        # The ranks are in step, and what they agree on works.
        layer = MoELayer(**options, **common, max_tokens_per_rank=8)
        layer(x).sum().backward()


CHECKS = pytest.mark.parametrize("check", [check_constructors, check_different_layers])


@CHECKS
def test_threads_hear_of_what_another_has_given(check):
    run_on_ranks(check, 2)


def check_in_process(rank, size, folder, check):
    check(dist.group.WORLD, rank)


@CHECKS
def test_processes_hear_of_what_another_has_given(check, tmp_path):
    run_processes(check_in_process, 2, tmp_path, check)


def test_every_argument_that_changes_results_is_compared():
    """A new one shows up here."""
    free = {"self", "group", "config", "max_tokens_per_rank", "device"}
    arguments = set(inspect.signature(MoELayer.__init__).parameters)
    assert {name for _, _, name, _, _ in DIFFERENT} == arguments - free


def test_the_values_of_many_ranks_are_told():
    def work(member, rank):
        options = SIZES | {"routed_scaling_factor": (1, 2, 1, 3)[rank]}
        with pytest.raises(ValueError) as caught:
            MoELayer(**options, group=member, config=CONFIG, max_tokens_per_rank=8)
        values = "1.0 on ranks 0, 2; 2.0 on rank 1; 3.0 on rank 3"
        assert str(caught.value) == f"routed_scaling_factor: ranks disagree: {values}"

    run_on_ranks(work, 4)


def test_a_rank_without_a_layer_meets_one_with_a_layer():
    """Explicit calls on one rank, a layer on the other: its options are compared with nothing."""
    experts = torch.tensor([[0, 3], [1, 2]])

    def work(member, rank):
        x = torch.ones(2, 32)
        layer = MoELayer(**SIZES, group=member, config=CONFIG, scoring="sigmoid")
        if rank == 0:
            layer.reserve(2)
            layer(x)
            return
        shapes = {"hidden_size": 32, "topk": 2, "dtype": torch.float32}
        workspace = functional.get_workspace(CONFIG, member, num_local_tokens=2, **shapes)
        weights = layer.experts.parameters()
        functional.moe(
            x,
            experts,
            torch.ones(2, 2),
            *weights,
            workspace=workspace,
            config=CONFIG,
            num_experts=4,
        )

    run_on_ranks(work, 2)


def test_memory_that_runs_out_in_one_ranks_constructor_is_told(monkeypatch):
    """What no check foresees."""
    make_parameters = MoELayer.reset_parameters

    def fail_on_rank_1(layer, *arguments):
        if layer.group.rank == 1:
            raise MemoryError("none left")
        make_parameters(layer, *arguments)

    def work(member, rank):
        options = SIZES | {"group": member, "config": CONFIG, "max_tokens_per_rank": 8}
        with pytest.raises(MemoryError, match=rf"^{'rank 1: ' * (rank == 0)}none left$"):
            MoELayer(**options)

    monkeypatch.setattr(MoELayer, "reset_parameters", fail_on_rank_1)
    run_on_ranks(work, 2)


def test_the_error_of_a_constructor_stays_the_first_one_if_nobody_comes_to_hear_it():
    config = dataclasses.replace(CONFIG, timeout_seconds=0.1)

    def work(member, rank):
        if rank == 0:
            with pytest.raises(TypeError, match="dtype: expected") as caught:
                MoELayer(**SIZES, group=member, config=config, dtype=3, max_tokens_per_rank=8)
            assert isinstance(caught.value.__cause__, RankTimeoutError)

    run_on_ranks(work, 2)


def test_a_constructor_that_is_not_collective_meets_nobody():
    def work(member, rank):
        if rank == 0:
            with pytest.raises(TypeError, match="dtype: expected"):
                MoELayer(**SIZES, group=member, config=CONFIG, dtype=3)
        return MoELayer(**SIZES, group=member, config=CONFIG)(torch.zeros(4, 32))

    run_on_ranks(work, 2)


def raise_timeout(*arguments):
    raise RankTimeoutError("a pass has not ended")


@pytest.mark.parametrize("group", [None, InProcessGroup(1).member(0)], ids=["none", "one"])
@pytest.mark.parametrize("broken", [2, 1])  # top_k, and the shared expert's
def test_reserve_makes_what_is_unusable_anew_on_one_rank(group, broken):
    layer = MoELayer(**SIZES, shared_intermediate_size=8, gradient_block=3, group=group)
    layer.reserve(8)
    x = torch.randn(8, 32)
    expected = layer(x)
    key = (torch.device("cpu"), 32, broken, torch.float32)
    workspace = SingleRank.workspaces[key]
    workspace.check = workspace.host_call = raise_timeout
    for _ in range(2):  # no call replaces it silently
        with pytest.raises(RankTimeoutError):
            layer(x)
    layer.reserve(100)
    assert SingleRank.workspaces[key] is not workspace
    assert SingleRank.workspaces[key].num_local_tokens == (100 if broken == 2 else 3)
    assert torch.equal(layer(x), expected)


def test_reserve_of_a_layer_without_memory():
    MoELayer(**SIZES, device="meta", max_tokens_per_rank=8)


@pytest.mark.parametrize("device", ["cuda", "cuda:7", torch.device("cuda")])
def test_a_gpu_that_is_not_there_is_refused_by_name(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device: expected cpu \(.*\), got cuda"):
        MoELayer(**SIZES, device=device)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_bias_that_is_not_finite_raises_on_every_rank(value):
    def work(member, rank):
        layer = MoELayer(**SIZES, scoring="sigmoid", group=member, config=CONFIG)
        x = torch.zeros(4, 32)
        for _ in range(2):  # before and after there is a workspace
            if rank == 1:
                layer.router.expert_bias[2] = value
            text = (
                rf"^{'rank 1: ' * (rank == 0)}router.expert_bias: expected finite numbers, got \["
            )
            with pytest.raises(ValueError, match=text):
                layer(x)
            layer.router.expert_bias.zero_()
            layer(x)

    run_on_ranks(work, 2)


@pytest.mark.parametrize("options", [{}, {"shared_intermediate_size": 8, "gradient_block": 2}])
@pytest.mark.parametrize("fuses", [False, True])
def test_x_that_is_changed_before_the_backward_is_named(options, fuses):
    if fuses:
        options = {"gradient_accumulation_fusion": True}
    layer = MoELayer(**SIZES, **options)
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    x = torch.randn(4, 32, requires_grad=True) * 1
    x += layer(x)
    with pytest.raises(RuntimeError, match=r"^MoE layer, backward: x, .* \(x \+= layer\(x\)"):
        x.sum().backward()


def test_a_compiled_layer_of_several_ranks_says_that_it_has_to_be_reserved():
    def work(member, rank):
        layer = MoELayer(**SIZES, group=member, config=CONFIG)
        if rank == 0:  # one thread: Dynamo has a lock
            with pytest.raises(
                Exception, match=r"call MoELayer.reserve\(tokens\), or pass max_tok"
            ):
                torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.zeros(4, 32))

    run_on_ranks(work, 2)


@pytest.mark.parametrize("limit", [numpy.float32(7), numpy.int64(7), "7", True])
def test_a_limit_that_a_compiler_makes_a_tensor_of_is_named(limit):
    layer = MoELayer(**SIZES)
    x, routes, weight = torch.randn(4, 32), torch.tensor([[0, 1]] * 4), torch.ones(4, 2)
    weights = [p.detach() for p in layer.experts.parameters()]

    def call(x, limit):
        return functional.moe(x, routes, weight, *weights, swiglu_limit=limit)

    def compiled(limit, **options):
        torch.compiler.reset()
        return torch.compile(call, backend="aot_eager", **options)(x, limit)

    text = "swiglu_limit: expected a float, an int or None where torch.compile traces moe"
    with pytest.raises(Exception, match=text):
        compiled(limit, fullgraph=True)
    if isinstance(limit, numpy.number):
        # In pieces, of which none is the layer.
        assert torch.equal(compiled(limit), call(x, limit))
    assert torch.equal(compiled(7.0, fullgraph=True), call(x, 7.0))
    assert torch.equal(compiled(7, fullgraph=True), call(x, 7.0))


@pytest.mark.parametrize("size", ["2", "1", "", None])
def test_a_group_that_is_not_there_yet_is_noticed(monkeypatch, size):
    monkeypatch.setattr(DistributedGroup, "was_made", False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    assert dist.group.WORLD is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MoELayer(**SIZES)
        if size != "2":
            MoELayer(**SIZES, group=dist.group.WORLD)
            return
        with pytest.raises(
            UserWarning, match=r"group is None, .* WORLD_SIZE is 2 .* init_process_g"
        ):
            MoELayer(**SIZES, group=dist.group.WORLD)
        monkeypatch.setattr(DistributedGroup, "was_made", True)
        MoELayer(**SIZES, group=None)  # after the training, say
