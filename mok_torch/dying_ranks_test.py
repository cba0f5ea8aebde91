"""A rank that is gone before ranks meet: the others raise within the timeout and name it."""

import functools
import itertools
import re
import time

import pytest
import torch
import torch.distributed as dist

from mok_torch import MoELayer, RankTimeoutError
from mok_torch.functional import MoKConfig, create_workspace
from mok_torch.groups import DistributedGroup
from mok_torch.host_process_test_support import die, raised_by, run_processes

TIMEOUT = 3  # the survivors, whom a barrier lets go, must come within it on a loaded machine
CONFIG = MoKConfig(timeout_seconds=TIMEOUT, num_threads=1)
PATIENT = MoKConfig(timeout_seconds=60, num_threads=1)
SHAPES = {"num_local_tokens": 9, "hidden_size": 64, "topk": 2}
DEAD = 1


def make_layer(config=CONFIG):
    torch.manual_seed(1)  # full_state_dict wants the same router on every rank
    return MoELayer(64, 24, num_experts=5, top_k=2, config=config, group=dist.group.WORLD)


def assert_names_the_dead(call, dead=DEAD):
    begin = time.monotonic()
    error = raised_by(call)
    # Gloo would wait for half an hour.
    assert time.monotonic() - begin < 40
    assert isinstance(error, RankTimeoutError), repr(error)
    assert re.search(rf"rank \d.*(ranks \[{dead}\] |kept by rank {dead},)", str(error)), error


def dead_before(rank, size, folder):
    """Everything that meets on the host, after a rank has died between two calls."""
    workspace = create_workspace(PATIENT, dist.group.WORLD, **SHAPES)
    layer = make_layer(PATIENT)
    layer(torch.randn(5, 64))
    part, survivors = dist.new_group([DEAD, 2]), dist.new_group([0, 2])
    create_workspace(PATIENT, dist.group.WORLD, **SHAPES)
    if rank == DEAD:
        die(rank, folder)
    workspace.timeout_seconds = TIMEOUT
    layer.config = CONFIG
    meetings = [
        lambda: create_workspace(CONFIG, dist.group.WORLD, **SHAPES),
        lambda: workspace.grow(99),
        layer.global_expert_load,
        layer.full_state_dict,
        lambda: layer.reserve(99),
        lambda: make_layer()(torch.randn(5, 64)),
    ]
    for meeting in meetings:
        dist.barrier(survivors)
        assert_names_the_dead(meeting)
    if rank == 2:
        # Ranks are those of the group.
        assert_names_the_dead(lambda: create_workspace(CONFIG, part, **SHAPES), dead=0)


def dies_while_growing(rank, size, folder):
    """Killed between the two meetings of a growth."""
    workspace = create_workspace(CONFIG, dist.group.WORLD, **SHAPES)
    if rank == DEAD:
        DistributedGroup.host_record = lambda group: die(rank, folder)
    assert_names_the_dead(lambda: workspace.grow(99))


def dies_in_a_broadcast(rank, size, folder, survived):
    """Killed in the collective of gloo between meetings: gloo fails first, and names nobody.

    survived: broadcasts before. In the last one of all, rank 0 has nothing to do with the dead.
    """
    layer = make_layer()
    layer.full_state_dict()
    broadcast, calls = dist.broadcast, itertools.count()

    def die_in_time(*arguments, **options):
        if next(calls) == survived:
            die(rank, folder)
        return broadcast(*arguments, **options)

    if rank == DEAD:
        dist.broadcast = die_in_time
    assert_names_the_dead(layer.full_state_dict)


def keeper_dies(rank, size, folder):
    """The process that keeps the group's store takes the store with it."""
    workspace = create_workspace(CONFIG, dist.group.WORLD, **SHAPES)
    if rank == 0:
        die(rank, folder)
    for _ in range(2):
        assert_names_the_dead(lambda: workspace.grow(99), dead=0)


@pytest.mark.parametrize(
    ("worker", "dead", "store"),
    [
        (dead_before, DEAD, "tcp"),
        (dies_while_growing, DEAD, "tcp"),
        (functools.partial(dies_in_a_broadcast, survived=0), DEAD, "file"),
        (functools.partial(dies_in_a_broadcast, survived=8), DEAD, "file"),
        (keeper_dies, 0, "tcp"),
    ],
)
def test_the_others_name_a_dead_rank(tmp_path, worker, dead, store):
    run_processes(worker, 3, tmp_path, killed=(dead,), store=store)


def slow(rank, size, folder):
    """A rank that keeps the others waiting, but comes, harms nothing."""
    workspace = create_workspace(PATIENT, dist.group.WORLD, **SHAPES)
    layer = make_layer(PATIENT)
    for meeting in (lambda: workspace.grow(99), layer.global_expert_load, layer.full_state_dict):
        dist.barrier()
        begin = time.monotonic()
        if rank == DEAD:
            time.sleep(1)
        meeting()
        assert time.monotonic() - begin > 0.9
    assert workspace.num_local_tokens == 99
    # The one that keeps the store leaves at once: the others have got what they came for.
    assert layer.global_expert_load().shape == (5,)
    if rank == 0:
        die(rank, folder)


def test_a_slow_rank_is_waited_for(tmp_path):
    run_processes(slow, 3, tmp_path, killed=(0,), store="tcp")
