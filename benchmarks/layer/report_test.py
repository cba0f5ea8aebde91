"""Floors and what is printed."""

import io
import json

import pytest
import rich.console
import torch

from benchmarks.layer.cases import Load, make_case
from benchmarks.layer.measure import Product, Rates, Times
from benchmarks.layer.memory import Memory
from benchmarks.layer.report import CaseResult, print_result, write_json, write_plot


@pytest.fixture
def result() -> CaseResult:
    case = make_case("kimi", "model")
    times = {
        "MoK": Times(2.0, 2.1, 0.1, None),
        "peer": Times(3.0, 4.0, 0.2, 9.0),
        "other": Times(4.0, 5, 1, 8),
    }
    link_bytes = {"MoK": 2e8, "peer": 1e8, "other": 2e8}
    memory = {"peer": Memory(3 * 10**9, 2 * 10**9, 5 * 10**8)}
    rates, turn_rates = Rates(786, 678), Rates(680, 640)
    return CaseResult(case, Load(16384, 2.3e8), rates, turn_rates, times, link_bytes, memory)


def test_floors(result):
    assert result.floor_ms(True) == pytest.approx(2.065, abs=1e-3)
    assert result.floor_ms(False) == pytest.approx(7.18, abs=1e-2)  # the design's table has 7.19
    assert result.floor_ms(True, in_turns=True) == pytest.approx(2.065 * 786 / 680, abs=1e-3)
    assert result.floor_ms(False, in_turns=True) == pytest.approx(7.18 * 678 / 640, abs=1e-2)
    result.load = Load(16384, 372e9)
    assert result.floor_ms(True) == pytest.approx(1000)
    assert result.floor_ms(False) == pytest.approx(2000)


def test_rates_of_a_product():
    product = Product(torch.device("cpu"))
    assert product.size == 256
    # 2 * 256^3 operations: in 0.1 ms, and ten times in 2 ms.
    rates = product.rates(0.1, 2.0, 10)
    assert rates.burst == pytest.approx(0.33554432)
    assert rates.sustained == pytest.approx(0.16777216)


def test_best_peer_is_not_mok(result):
    assert result.best_peer_ms("forward") == 3.0
    assert result.best_peer_ms("forward_backward") == 8.0


def test_table_shows_ratios(result):
    text = io.StringIO()
    print_result(result, rich.console.Console(file=text, width=200))
    (line,) = (line for line in text.getvalue().splitlines() if line.startswith(" MoK"))
    cells = line.split()
    assert cells[1:9] == ["2.000", "812", "100", "0.97", "0.84", "1.50", "2.100", "0.100"]
    assert cells[9:] == ["-"] * 9
    (line,) = (line for line in text.getvalue().splitlines() if line.startswith(" peer"))
    assert line.split()[-3:] == ["3.00", "1.50", "1.20"]


def test_json_and_plot(result, tmp_path):
    write_json(str(tmp_path / "layer.json"), {"device": "none"}, [result])
    (case,) = json.loads((tmp_path / "layer.json").read_text())["cases"]
    assert case["layers"]["peer"]["planned_forward"] == 4.0
    assert case["layers"]["peer"]["step_bytes"] == 3 * 10**9
    assert case["layers"]["peer"]["backward_rows_bytes"] == 5 * 10**8
    assert "step_bytes" not in case["layers"]["MoK"]
    assert case["forward_floor_ms"] == result.floor_ms(True)
    write_plot(str(tmp_path / "layer.png"), [result])
    assert (tmp_path / "layer.png").stat().st_size > 10_000
