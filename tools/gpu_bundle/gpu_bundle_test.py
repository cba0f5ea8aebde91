"""A bundle is complete, and what of run.sh needs no GPU works."""

import os
import pathlib
import subprocess
import sys

import pytest

from tools.gpu_bundle import gpu_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("bundle")
    gpu_bundle.make_bundle(gpu_bundle.RUNFILES, folder)
    return folder


def run(bundle: pathlib.Path, *arguments: str, **environment) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(bundle / "run.sh"), *arguments],
        env=clean | {"PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_everything_is_there(bundle):
    files = {str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file()}
    assert {f"bin/{name}" for name in (*gpu_bundle.PROGRAMS, *gpu_bundle.DATA)} <= files
    assert "tests/mok_torch/functional_test.py" in files
    assert "tests/mok_torch/test_support.py" in files
    assert "benchmarks/benchmarks/transport/libtransport.so" in files
    assert "benchmarks/benchmarks/grouped_gemm/libgrouped_gemm.so" in files
    assert "benchmarks/benchmarks/layer/layer.py" in files
    for example in ("train_lm", "data_parallel"):
        assert f"examples/examples/{example}/{example}.py" in files
        assert f"examples/examples/{example}/{example}_cuda_test.py" in files
    assert sum(name.startswith("wheel/mok_torch-") for name in files) == 1
    for name in gpu_bundle.PROGRAMS:
        assert os.access(bundle / "bin" / name, os.X_OK)


def test_check_passes_and_a_damaged_file_is_named(bundle, tmp_path):
    result = run(bundle, "check", MOK_BUNDLE_WORK=str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "--- harness: passed" in result.stdout
    assert "--- example: passed" in result.stdout
    damaged = bundle / "benchmarks/benchmarks/layer/cases.py"
    text = damaged.read_text()
    try:
        damaged.write_text(text + "\n")
        result = run(bundle, "check", MOK_BUNDLE_WORK=str(tmp_path))
    finally:
        damaged.write_text(text)
    assert result.returncode == 1
    assert "benchmarks/benchmarks/layer/cases.py: FAILED" in result.stdout


@pytest.mark.parametrize("word", ["unit", "pytest", "benchmarks"])
def test_without_a_gpu_nothing_is_called_passed(bundle, tmp_path, word):
    result = run(bundle, word, MOK_BUNDLE_WORK=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 1 and "no GPU" in result.stdout


def test_wrong_words_and_wrong_python(bundle, tmp_path):
    assert run(bundle, "everything").returncode == 2
    assert run(bundle).returncode == 2
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho cp27\n")
    other.chmod(0o755)
    result = run(bundle, "check", PYTHON=str(other), MOK_BUNDLE_WORK=str(tmp_path / "work"))
    assert result.returncode == 1 and "is not for" in result.stdout


def test_nothing_is_overwritten_and_what_is_missing_is_named(bundle, tmp_path):
    with pytest.raises(FileExistsError):
        gpu_bundle.make_bundle(gpu_bundle.RUNFILES, bundle)
    with pytest.raises(FileNotFoundError, match="mok_torch: expected one wheel"):
        gpu_bundle.make_bundle(tmp_path, tmp_path / "output")
