"""The formula's arithmetic, and what a measurement adds up."""

import dataclasses

import pytest
import torch

from benchmarks.layer.cases import Load, make_case
from benchmarks.layer.memory import (
    Memory,
    backward_rows_bytes,
    given_bytes,
    measure_memory,
    needed_bytes,
    step_bytes,
)
from benchmarks.layer.problem import GRADIENTS, Problem

CASE = dataclasses.replace(make_case("tiny", "model"), tokens=100)


def make_problem_of_zeros(ranks: int) -> Problem:
    case, dtype = CASE, torch.bfloat16
    return Problem(
        case=case,
        rank=0,
        ranks=ranks,
        group=None,
        load=Load(0, 0.0),
        x=torch.zeros(case.tokens, case.hidden, dtype=dtype),
        d_out=torch.zeros(case.tokens, case.hidden, dtype=dtype),
        topk_idx=torch.zeros(case.tokens, case.topk, dtype=torch.int64),
        topk_weight=torch.zeros(case.tokens, case.topk),
        gate=torch.zeros(case.local_experts, case.intermediate, case.hidden, dtype=dtype),
        up=torch.zeros(case.local_experts, case.intermediate, case.hidden, dtype=dtype),
        down=torch.zeros(case.local_experts, case.hidden, case.intermediate, dtype=dtype),
        shared_gate=torch.zeros(case.shared, case.hidden, dtype=dtype),
        shared_up=torch.zeros(case.shared, case.hidden, dtype=dtype),
        shared_down=torch.zeros(case.hidden, case.shared, dtype=dtype),
    )


def ring_of(rows: int) -> int:
    """Bytes: H = 64, I = Is = 32, 100 tokens."""
    return 2 * (rows * (64 + 2 * 32) + 100 * 2 * 32)


def test_needed_bytes_by_hand():
    # 4 local experts and the shared one.
    weights = 5 * 3 * 64 * 32 * 2
    inputs = 2 * (100 * 64 * 2) + 100 * 3 * (8 + 4)
    outputs = 2 * (100 * 64 * 2) + 100 * 3 * 4
    # Two ranks: 300 rows each if balanced, 75 more, one row block an expert, whole row blocks: 7.
    assert needed_bytes(CASE, 2, 2) == inputs + outputs + 2 * weights + ring_of(7 * 128)
    # One rank keeps the worst case: three experts with a row in their last block, 297 rows in two.
    assert needed_bytes(CASE, 1, 2) == inputs + outputs + 2 * weights + ring_of(6 * 128)


def test_needed_bytes_cover_what_is_there_before_the_step():
    problem = make_problem_of_zeros(2)
    outputs_and_ring = 2 * (100 * 64 * 2) + 100 * 3 * 4 + ring_of(7 * 128)
    gradients = 5 * 3 * 64 * 32 * 2
    assert needed_bytes(CASE, 2, 2) == given_bytes(problem) + outputs_and_ring + gradients


def test_rows_of_a_backward_by_hand():
    # In the ring 64 + 32 elements a row, w * h of 100 tokens, and 300 routes of 64.
    assert backward_rows_bytes(CASE, 2, 2) == 2 * (7 * 128 * 96 + 100 * 32 + 300 * 64)
    assert backward_rows_bytes(CASE, 1, 4) == 4 * (6 * 128 * 96 + 100 * 32 + 300 * 64)


def test_needed_bytes_of_a_model():
    # Dominated by 6 experts' weights and gradients, 1.1 GB, and by a ring of 21,248 rows, 0.5 GB.
    kimi = make_case("kimi", "model")
    assert needed_bytes(kimi, 2, 2) == pytest.approx(1.85e9, rel=0.01)
    # d_out in the ring 0.3 GB, w * h 0.1, rows on their way 0.24.
    assert backward_rows_bytes(kimi, 2, 2) == pytest.approx(0.64e9, rel=0.01)


class FakeMemory:
    """Bookkeeping over a list of events."""

    def __init__(self):
        self.events = []

    def allocated(self):
        self.events.append("allocated")
        return 1000

    def restart(self):
        self.events.append("restart")

    def peak_since(self, allocated):
        self.events.append("peak")
        return 5000 - allocated


class FakeLayer:
    name = "fake"
    resident_bytes = 70

    def __init__(self, problem: Problem, memory: FakeMemory, names=GRADIENTS):
        self.problem, self.memory, self.names = problem, memory, names

    def plan(self):
        self.memory.events.append("plan")

    def forward(self):
        self.memory.events.append("forward")
        return self.problem.x

    def backward(self):
        self.memory.events.append("backward")
        return dict.fromkeys(self.names)


def test_measured_bytes_are_given_held_and_allocated_ones():
    problem, memory = make_problem_of_zeros(2), FakeMemory()
    measured = step_bytes(FakeLayer(problem, memory), problem, memory)
    assert measured == given_bytes(problem) + 70 + 4000
    assert memory.events == ["allocated", "restart", "plan", "forward", "backward", "peak"]
    with pytest.raises(RuntimeError, match="fake: not the results of a step"):
        step_bytes(FakeLayer(problem, memory, names=("x",)), problem, memory)


def test_no_measurement_without_a_gpu():
    problem = make_problem_of_zeros(1)
    assert measure_memory([FakeLayer(problem, FakeMemory())], set(), problem) == {}


def test_ratio():
    memory = Memory(measured=210, needed=150, backward_rows=50)
    assert (memory.over_needed, memory.over_needed_with_rows) == (1.4, 1.05)
