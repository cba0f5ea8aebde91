"""The benchmark compares like with like, and prints what scripts read."""

import json

import pytest
import torch
from absl import flags

from benchmarks.host_layer import host_layer
from benchmarks.host_layer.host_layer import Shape, check_same_result, make_inputs, measure

TINY = Shape(tokens=24, hidden=32, intermediate=16, experts=7, topk=3, shared=8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [TINY, Shape(5, 16, 8, 40, 2, 0)])
def test_both_layers_compute_the_same(shape, dtype):
    check_same_result(*make_inputs(shape, dtype))


def test_measure_reports_medians_and_ratios():
    result = measure(TINY, torch.float32, iterations=2)
    assert result["mok_forward_ms"] > 0
    expected = result["torch_forward_backward_ms"] / result["mok_forward_backward_ms"]
    assert result["forward_backward_ratio"] == expected


def test_json_has_one_object_a_shape(monkeypatch, capsys):
    monkeypatch.setattr(host_layer, "SHAPES", {"tiny": TINY})
    flags.FLAGS(["host_layer", "--json", "--iterations=1"])
    host_layer.main(["host_layer"])
    record = json.loads(capsys.readouterr().out)
    assert record["shape"] == "tiny" and record["topk"] == 3 and "forward_ratio" in record
