"""The commands, as a user runs them."""

import json
import os
import subprocess
import sys

import pytest
import torch

from mok_torch import _C
from mok_torch.cli import check
from mok_torch.cli.main import COMMANDS
from mok_torch.self_test import Case, Comparison, compare


def run(*arguments, columns=160):
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": str(columns)}
    return subprocess.run(
        [sys.executable, "-m", "mok_torch", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )


def test_info_table():
    result = run("info")
    assert result.returncode == 0, result.stderr
    for text in (torch.__version__, _C.ISA_NAMES[_C.best_isa()], "host"):
        assert text in result.stdout


def test_info_json():
    values = json.loads(run("info", "--json").stdout)
    assert values["backends"] == (["host", "cuda"] if _C.CUDA_BUILT else ["host"])
    assert len(values["gpus"]) == torch.cuda.device_count()
    assert values["torch"] == torch.__version__
    assert values["best_isa"] in values["isas"]
    assert values["cores"] >= 1


def test_check_passes_on_this_machine():
    result = run("check")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all checks passed" in result.stdout
    for case in check.CASES:
        assert result.stdout.count(case.name) == 2  # bf16 and fp32


def test_check_cuts_nothing_off_where_there_is_little_room():
    result = run("check", "--precision=fp32", columns=30)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "\N{HORIZONTAL ELLIPSIS}" not in result.stdout
    lines = result.stdout.splitlines()
    for case in check.CASES:
        (line,) = (line for line in lines if case.name in line)
        assert "1.0e-05" in line and line.split()[-1] == "ok"


@pytest.mark.parametrize("isa", [n for i, n in enumerate(_C.ISA_NAMES) if _C.isa_supported(i)])
def test_check_on_every_isa(isa):
    result = run("check", f"--isa={isa}", "--precision=fp32")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"on {isa}" in result.stdout


def test_check_names_what_keeps_it_from_a_gpu():
    result = run("check", "--device=cuda")
    if torch.cuda.is_available() and _C.CUDA_BUILT:
        assert "all checks passed" in result.stdout, result.stdout + result.stderr
        return
    assert result.returncode != 0
    assert "device: expected cpu (" in result.stdout + result.stderr


def test_check_fails_loudly(monkeypatch, capsys):
    bad = Comparison("d_x", error=0.5, row_error=0.5, limit=4e-3, row_limit=2e-2)
    monkeypatch.setattr(check, "compare", lambda case, dtype, device: [bad])
    if not check.flags.FLAGS.is_parsed():
        check.flags.FLAGS(["check"])
    assert check.main(["check"]) == 1
    assert "some checks FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 5e-3])
def test_comparison_rejects(value):
    limits = {"limit": 4e-3, "row_limit": 4e-3}
    assert not Comparison("out", value, 0.0, **limits).ok
    assert not Comparison("out", 0.0, value, **limits).ok
    assert Comparison("out", 1e-3, None, **limits).ok


def test_compare_notices_a_wrong_layer(monkeypatch):
    case = Case("", tokens=(9,), hidden=16, intermediate=8, experts=3)
    assert all(comparison.ok for comparison in compare(case, torch.float32))
    run_layer = check.run_layer

    def wrong(case, batch, device):
        results = run_layer(case, batch, device)
        results["d_w_up"][1, 2, 3] += 0.1
        return results

    monkeypatch.setattr("mok_torch.self_test.run_layer", wrong)
    failed = [comparison.tensor for comparison in compare(case, torch.float32) if not comparison.ok]
    assert failed == ["d_w_up"]


def test_no_command_and_unknown_command():
    for arguments, problem in (((), "no command given"), (("frob",), "unknown command 'frob'")):
        result = run(*arguments)
        assert result.returncode == 2
        assert problem in result.stderr
        assert all(command in result.stderr for command in COMMANDS)


def test_help():
    result = run("--help")
    assert result.returncode == 0 and "usage" in result.stdout
    for command, flag in (("check", "--isa"), ("info", "--[no]json")):
        for help_flag in ("--help", "-helpfull"):
            result = run(command, help_flag)
            assert result.returncode == 0 and flag in result.stdout, result.stderr
    for wrong in (["--frob"], ["--precision=bad", "--help"], ["--frob", "--", "--help"]):
        result = run("check", *wrong)
        assert result.returncode == 1 and wrong[0].lstrip("-") in result.stderr


def test_stray_arguments_are_refused():
    result = run("info", "stray")
    assert result.returncode != 0 and "stray" in result.stdout + result.stderr
