"""Tests each lint checker on planted violations and on near misses."""

import textwrap

import pytest

from tools.lint import (
    cpp_text,
    dependency_rule,
    fences,
    formatters,
    source_tree,
    style_limits,
    top_level,
)

# Built from parts, so that this file passes its own tests.
_ASM = "as" + "m"


def _cpp_function(lines, name="Long", first="void {}() {{"):
    return "\n".join([first.format(name), *["  Step();"] * (lines - 2), "}"]) + "\n"


def _python_function(lines):
    return "def long():\n" + "    step()\n" * (lines - 1)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("mok_core/a.cc", "int x;\n" * 500),
        ("mok_core/a.cc", _cpp_function(80)),
        ("mok_core/a.h", "//" + "x" * 98 + "\n"),
        ("mok_core/a.cu", _cpp_function(120, name="ProducerRole")),
        ("mok_torch/a.py", _python_function(80)),
        ("mok_torch/a.md", "x" * 300),
    ],
)
def test_limits_accept(path, text):
    assert style_limits.check(path, text) == []


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("mok_core/a.cc", "int x;\n" * 501, "a.cc:1: 501 lines"),
        ("mok_core/a.cuh", "int x;\n//" + "x" * 99 + "\n", "a.cuh:2: 101 columns"),
        ("mok_core/a.cc", "\n" + _cpp_function(81), "a.cc:2: function Long has 81 lines"),
        ("mok_core/a.cu", _cpp_function(121, name="ProducerRole"), "ProducerRole has 121 lines"),
        ("mok_torch/a.py", _python_function(81), "function long has 81 lines"),
        ("tools/a.bzl", _python_function(81), "function long has 81 lines"),
    ],
)
def test_limits_reject(path, text, expected):
    (violation,) = style_limits.check(path, text)
    assert expected in violation


def test_role_limit_counts_code_lines_only():
    text = _cpp_function(120, name="ProducerRole").replace("{\n", "{\n" + "  // why\n\n" * 40, 1)
    assert style_limits.check("mok_core/a.cu", text) == []


def test_cpp_functions_are_found():
    text = textwrap.dedent(
        """\
        #define OPEN {
        namespace a::b {
        // void NotThis() {
        const char* kText = "void NorThis() {";
        const auto kRaw = R"(void NorThat() {)";
        constexpr int kBig = 1'000'000;
        struct Point { int x = {3}; int Get() const { return x; } };
        enum class Kind : int { kOne, kTwo };
        int table[] = {Make(1), Make(2)};
        template <class T, typename U = Foo<T>>
        auto Run(T first, U second) -> decltype(first) {
          if (first) { return [&] { return second; }(); }
          struct Local { int y; };
        }
        Point::Point(int x) : x(x), y{x} {}
        }  // namespace a::b
        """
    )
    found = [(f.name, f.first_line, f.last_line) for f in cpp_text.functions(text)]
    assert ("Get", 7, 7) in found
    assert ("Run", 10, 14) in found
    assert all("Th" not in name for name, _, _ in found)


@pytest.mark.parametrize("keyword", [_ASM, f"__{_ASM}", f"__{_ASM}__"])
def test_assembly_outside_the_fence(keyword):
    text = f'int x;\nvoid F() {{\n  {keyword} volatile("nop;");\n}}\n'
    (violation,) = fences.check("mok_gemm/sm90/a.cuh", text)
    assert violation.startswith("mok_gemm/sm90/a.cuh:3: inline assembly")
    assert fences.check("mok_core/ptx/a.cuh", text) == []
    # Where only the host compiler comes, it is no PTX.
    assert fences.check("mok_megakernel/a.cc", text) == []
    assert fences.check("mok_core/emulator/twins/a.h", text) == []


def test_assembly_in_comments_and_strings_is_no_assembly():
    assert (
        fences.check("mok_gemm/a.cuh", f'// {_ASM} here\nauto s = "{_ASM}";\nint {_ASM}s;\n') == []
    )


@pytest.mark.parametrize("header", ["torch/extension.h", "ATen/ATen.h", "c10/util/Half.h"])
def test_pytorch_headers_are_refused_everywhere(header):
    assert "PyTorch" in fences.check("mok_torch/a.cc", f"#include <{header}>\n")[0]


@pytest.mark.parametrize("header", ["Python.h", "pybind11/pybind11.h"])
def test_python_headers_only_in_mok_torch(header):
    text = f"#include <{header}>\n"
    assert "mok_torch only" in fences.check("mok_megakernel/a.cc", text)[0]
    assert fences.check("mok_torch/a.cc", text) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("mok_core/a.cc", '#include "mok_comm/heap.h"\n'),
        ("mok_comm/a.h", '  #  include "mok_gemm/a.h"\n'),
        ("mok_gemm/a.cu", "#include <mok_schedule/a.h>\n"),
        ("mok_schedule/a.cc", '#include "mok_megakernel/a.h"\n'),
        ("mok_megakernel/a.cc", '#include "mok_torch/a.h"\n'),
        ("mok_core/BUILD", 'cc_library(name = "a", deps = ["//mok_comm"])\n'),
        ("mok_comm/host/BUILD", 'cc_test(name = "a", data = ["//mok_gemm:b"])\n'),
        ("mok_gemm/BUILD", 'genrule(name = "a", cmd = "$(location //mok_schedule:b)")\n'),
        ("mok_gemm/BUILD", 'cc_library(name = "a", deps = ["@mok//mok_schedule:b"])\n'),
        ("mok_megakernel/BUILD", 'cc_library(name = "a", deps = ["//examples:b"])\n'),
        ("mok_schedule/defs.bzl", 'load("//mok_torch:defs.bzl", "x")\n'),
        ("mok_schedule/a.py", "from mok_torch import layer\n"),
        ("tools/a.py", "import mok_torch.layer\n"),
    ],
)
def test_dependency_rule_rejects(path, text):
    (violation,) = dependency_rule.check(path, text)
    assert violation.startswith(path + ":1: ")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("mok_core/a.cc", '// #include "mok_comm/heap.h"\n#include <vector>\n'),
        ("mok_comm/a.cc", '#include "mok_core/status.h"\n#include "mok_comm/a.h"\n'),
        ("mok_megakernel/a.cc", '#include "mok_gemm/a.h"\n#include "mok_schedule/a.h"\n'),
        ("mok_core/BUILD", 'package(default_visibility = ["//mok_comm:__subpackages__"])\n'),
        ("mok_core/BUILD", 'cc_library(name = "a", visibility = ["//mok_torch:__pkg__"])\n'),
        ("tools/defs.bzl", '"""Used by //mok_torch:wheel."""\n'),
        ("mok_core/BUILD", 'load("//tools/cc:defs.bzl", "cc_library")\n# see https://mok_torch\n'),
        ("mok_torch/BUILD", 'x(name = "a", deps = ["//mok_megakernel"], url = "http://mok_x")\n'),
        ("benchmarks/a.py", "import mok_torch\nimport torch\n"),
        ("tools/gpu_bundle/BUILD", 'x(name = "a", data = ["//mok_torch:wheel"])\n'),
    ],
)
def test_dependency_rule_accepts(path, text):
    assert dependency_rule.check(path, text) == []


def test_quoted_includes_start_at_the_workspace_root():
    existing = {"mok_core/status.h", "examples/custom_kernel/ring.h"}
    text = '#include "mok_core/status.h"\n#include "status.h"\n#include <vector>\n'
    (violation,) = dependency_rule.check_quoted_includes("mok_core/a.cc", text, existing)
    assert violation == "mok_core/a.cc:2: no file status.h from the workspace root"
    nested = "examples/custom_kernel/ring.cc"
    assert not dependency_rule.check_quoted_includes(nested, '#include "ring.h"\n', existing)


def test_top_level_entries():
    expected = list(top_level.PACKAGES + top_level.FILES)
    assert top_level.check([*expected, "MODULE.bazel.lock"]) == []
    assert top_level.check([*expected, "scratch"]) == [
        "scratch: not a top-level entry of the design"
    ]
    assert top_level.check(expected[1:]) == [f"{expected[0]}: missing at the top level"]


def test_source_files_finds_everything_but_outputs(tmp_path):
    for name in ("a/b/new.cc", "BUILD", ".git/x.py", "bazel-out/x.py", "a/__pycache__/x.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    assert sorted(source_tree.source_files(tmp_path)) == ["BUILD", "a/b/new.cc"]


def test_formatters_report_badly_formatted_files(tmp_path):
    root = source_tree.workspace_root()
    for name in (".clang-format", ".ruff.toml"):
        (tmp_path / name).write_text((root / name).read_text())
    good, bad = tmp_path / "good.cc", tmp_path / "bad.cc"
    good.write_text("int main() { return 0; }\n")
    bad.write_text("int  main( ) {return 0;}\n")
    assert formatters.check_clang_format(tmp_path, ["good.cc"]) == []
    assert "bad.cc:1" in formatters.check_clang_format(tmp_path, ["good.cc", "bad.cc"])[0]
    (tmp_path / "good.py").write_text('"""A module."""\n\nX = 1\n')
    assert formatters.check_ruff_format(tmp_path) == []
    assert formatters.check_ruff(tmp_path) == []
    (tmp_path / "bad.py").write_text('"""A module."""\nimport os\nX = [ 1 ]\n')
    assert any("bad.py" in line for line in formatters.check_ruff_format(tmp_path))
    assert any("F401" in line for line in formatters.check_ruff(tmp_path))
