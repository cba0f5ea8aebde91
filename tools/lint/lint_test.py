"""Holds the whole source tree to the style: formatting, limits, fences and the dependency rule.

It reads the real tree behind its MODULE.bazel, not its runfiles, and is never cached.
To repair formatting: see docs/build.md.
"""

import os

import pytest

from tools.lint import (
    dependency_rule,
    fences,
    formatters,
    source_tree,
    style_limits,
    top_level,
)

ROOT = source_tree.workspace_root()
PATHS = list(source_tree.source_files(ROOT))


def _report(violations):
    if violations:
        pytest.fail("\n".join([f"{len(violations)} lines:", *violations]), pytrace=False)


def _checked_paths():
    """Sources only: the checkers decide by name, data files are not read."""
    for path in PATHS:
        kinds = (source_tree.is_cpp, source_tree.is_python, source_tree.is_starlark)
        if any(is_kind(path) for is_kind in kinds):
            yield path


def _check_each(check):
    _report(
        [line for path in _checked_paths() for line in check(path, source_tree.read(ROOT, path))]
    )


def test_tree_is_the_real_one():
    assert (ROOT / "WORKSPACE").is_file() and (ROOT / "tools/lint/lint_test.py").is_file()
    assert len(PATHS) > 50


def test_top_level():
    _report(top_level.check(n for n in os.listdir(ROOT) if not n.startswith((".", "bazel-"))))


def test_style_limits():
    _check_each(style_limits.check)


def test_fences():
    _check_each(fences.check)


def test_dependency_rule():
    _check_each(dependency_rule.check)


def test_quoted_includes():
    existing = set(PATHS)
    _check_each(lambda path, text: dependency_rule.check_quoted_includes(path, text, existing))


def test_clang_format():
    _report(formatters.check_clang_format(ROOT, [p for p in PATHS if source_tree.is_cpp(p)]))


def test_ruff_format():
    _report(formatters.check_ruff_format(ROOT))


def test_ruff():
    _report(formatters.check_ruff(ROOT))
