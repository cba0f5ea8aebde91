"""Runs clang-format and ruff, both from the locked Python environment."""

import os
import pathlib
import subprocess
import sys


def _executable(name):
    return str(pathlib.Path(sys.executable).parent / name)


def _run(root, *command):
    result = subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "HOME": os.environ.get("TEST_TMPDIR", "/tmp")},
        capture_output=True,
        text=True,
        check=False,
    )
    return [] if result.returncode == 0 else (result.stdout + result.stderr).splitlines()


def check_clang_format(root, paths):
    """What clang-format would change in the given C++ files, as compiler-like lines."""
    # Bounded command lines: a tree may hold thousands of files.
    violations = []
    for start in range(0, len(paths), 200):
        batch = paths[start : start + 200]
        violations += _run(
            root, _executable("clang-format"), "--style=file", "--dry-run", "-Werror", *batch
        )
    return violations


def check_ruff_format(root):
    """Which Python files `ruff format` would change."""
    return _run(root, _executable("ruff"), "format", "--no-cache", "--check", ".")


def check_ruff(root):
    """What `ruff check` reports."""
    return _run(root, _executable("ruff"), "check", "--no-cache", "--output-format=concise", ".")
