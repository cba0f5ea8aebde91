"""Builds and runs examples/custom_kernel in its own workspace, as a consumer of @mok would."""

import os
import pathlib
import re
import subprocess

ROOT = pathlib.Path("MODULE.bazel").resolve().parent
TIMEOUT_SECONDS = 800


def _bazel(*arguments):
    """Runs the Bazel that runs this test on the consumer's workspace; the tree stays as it is."""
    temporary = os.environ["TEST_TMPDIR"]
    # Not the outer test's settings: this is a Bazel client, not a part of the test runner.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TEST_", "RUNFILES", "JAVA_RUNFILES", "PYTHON"))
    }
    environment.update(HOME=temporary, BAZELW_NO_APT="1")
    return subprocess.run(
        [
            str(ROOT / "bazelw"),
            f"--output_user_root={temporary}/bazel",
            "--host_jvm_args=-Xmx512m",
            "--max_idle_secs=30",
            *arguments,
        ],
        cwd=ROOT / "examples" / "custom_kernel",
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def _is_bazel_7():
    version = _bazel("--version").stdout
    return re.search(r"^bazel ([7-9]|\d\d)\.", version, re.MULTILINE) is not None


def _targets_for_kernels():
    """The labels in the first column of the table of docs/build.md."""
    targets = []
    for line in (ROOT / "docs" / "build.md").read_text().splitlines():
        if not line.startswith("| `//"):
            continue
        package = ""
        for label in re.findall(r"`([\w/:]+)`", line.split("|")[1]):
            package = label.split(":")[0] or package
            targets.append("@mok" + (package if label.startswith(":") else "") + label)
    return targets


def _assert_public(targets, flags):
    """Fails unless the consumer may depend on every one of the targets."""
    listed = f"set({' '.join(targets)})"
    result = _bazel("query", f"{listed} except visible(//:halo_program, {listed})", *flags)
    assert result.returncode == 0, result.stdout
    assert not re.search("^@", result.stdout, re.MULTILINE), f"not public: {result.stdout}"


def test_consumer_workspace():
    flags = [
        "--symlink_prefix=/",
        "--jobs=2",
        "--color=no",
        "--curses=no",
        f"--repo_env=CUDA_HOME={os.environ['OUTER_CUDA_HOME']}",
    ]
    if os.environ.get("GOOGLETEST_SRC"):
        flags.append(f"--repo_env=GOOGLETEST_SRC={os.environ['GOOGLETEST_SRC']}")
    if _is_bazel_7():
        flags.append("--lockfile_mode=off")
    targets = _targets_for_kernels()
    assert "@mok//mok_gemm/sm90:worker" in targets
    try:
        result = _bazel("test", "//...", *flags)
        _assert_public(targets, [f for f in flags if f.startswith(("--repo_env", "--lockfile"))])
    finally:
        _bazel("shutdown")
    print(result.stdout)
    assert result.returncode == 0
    for test in ["halo_program_test", "linear_test"]:
        assert re.search(rf"^//:{test} +PASSED", result.stdout, re.MULTILINE)
    cuda = "SKIPPED" if os.environ["OUTER_CUDA_HOME"] == "/empty" else "PASSED"
    assert re.search(rf"^//:linear_cuda_test +{cuda}", result.stdout, re.MULTILINE)
