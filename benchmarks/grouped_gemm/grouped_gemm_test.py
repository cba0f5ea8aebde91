"""What of the benchmark runs without a GPU and without its library."""

import ctypes

import torch

from benchmarks.grouped_gemm import grouped_gemm, library


def test_shapes_of_the_models():
    kimi = grouped_gemm.SHAPES["kimi gate_up"]
    assert (kimi.n, kimi.k, sum(kimi.counts)) == (2 * 2048, 7168, 2048 * 8)
    assert kimi.flops == 2 * 16384 * 4096 * 7168
    assert grouped_gemm.SHAPES["qwen down"].k == 1024
    assert sum(grouped_gemm.SHAPES["glm down"].counts) == 2048 * 8
    assert sum(grouped_gemm.SHAPES["deepseek down"].counts) == 2048 * 6


def test_medians_runs_every_variant_in_every_iteration(monkeypatch):
    runs = []
    monkeypatch.setattr(grouped_gemm, "elapsed_ms", lambda run: run())
    variants = {"a": lambda: runs.append("a") or 1.0, "b": lambda: runs.append("b") or 2.0}
    assert grouped_gemm.medians(variants, 3, lambda: None) == {"a": 1.0, "b": 2.0}
    assert runs.count("a") == runs.count("b") == 11


def test_arguments_have_the_layout_of_the_header():
    assert ctypes.sizeof(library.Args) == 120
    assert library.Args.swiglu_limit.offset == 20
    assert library.Args.rows.offset == 24
    assert library.Args.a.offset == 56


def test_reference_of_the_peers_is_the_product():
    """cuBLAS's role on a CPU: rows of each expert with that expert's weights."""
    shape = grouped_gemm.Shape((3, 0, 5), n=4, k=8, gate_up=False)
    problem = grouped_gemm.Problem(shape, torch.device("cpu"))
    problem.cublas()()
    begin = 0
    for expert, count in enumerate(shape.counts):
        rows = slice(begin, begin + count)
        expected = problem.a[rows].float() @ problem.b[expert].float().T
        torch.testing.assert_close(problem.peer_out[rows].float(), expected, rtol=1e-2, atol=1e-2)
        begin += count
