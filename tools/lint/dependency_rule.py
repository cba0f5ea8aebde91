"""The dependency rule of the design, on #include lines, Python imports and Bazel labels.

torch -> megakernel -> {comm, gemm, schedule} -> core; arrows go down only.
"""

import ast
import re

from tools.lint import cpp_text, fences, source_tree

_MIDDLE = ("mok_comm", "mok_gemm", "mok_schedule")
# What each package may use besides itself, tools and third_party.
ALLOWED = {
    "mok_core": (),
    "mok_comm": ("mok_core",),
    "mok_gemm": ("mok_core",),
    "mok_schedule": ("mok_core",),
    "mok_megakernel": ("mok_core", *_MIDDLE),
    "mok_torch": ("mok_core", *_MIDDLE, "mok_megakernel"),
    "examples": ("mok_core", *_MIDDLE, "mok_megakernel", "mok_torch"),
    "benchmarks": ("mok_core", *_MIDDLE, "mok_megakernel", "mok_torch"),
    "docs": (),
    "third_party": (),
    "tools": (),
    # Collects what the packages have built; nothing depends on it.
    "tools/gpu_bundle": (
        "mok_core",
        *_MIDDLE,
        "mok_megakernel",
        "mok_torch",
        "examples",
        "benchmarks",
    ),
}
_FREE = ("third_party", "tools")
# Who may see a target is not what the target depends on.
_VISIBILITY_ARGUMENTS = ("default_visibility", "visibility", "packages")
_LABEL = re.compile(r"(?:^|[^:\w/])(?:@@?mok)?//(\w+)|^(?:@@?mok)?//(\w+)")
_QUOTED_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


def _is_allowed(user, used):
    return used == user or used in _FREE or used not in ALLOWED or used in ALLOWED[user]


def _violation(path, line, user, used, how):
    may = ", ".join(ALLOWED[user]) or "no other package"
    return f"{path}:{line}: {how} {used}, but {user} may use {may}"


def _used_by_starlark(text):
    """[(line, top-level folder)] of the labels in a BUILD or .bzl file, visibility aside."""
    used = []

    def visit(node):
        if isinstance(node, ast.keyword) and node.arg in _VISIBILITY_ARGUMENTS:
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for match in _LABEL.finditer(node.value):
                used.append((node.lineno, match.group(1) or match.group(2)))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(text))
    return used


def _used_by_python(text):
    """[(line, top-level module)] of the imports of a Python file."""
    used = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            used += [(node.lineno, name.name.split(".")[0]) for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            used.append((node.lineno, node.module.split(".")[0]))
    return used


def _user_of(path):
    """The key of ALLOWED that the file belongs to: its top-level folder or one inside that."""
    folders = path.split("/")
    inner = "/".join(folders[:2])
    return inner if inner in ALLOWED else folders[0]


def check(path, text):
    """Returns the violations of one file as a list of "path:line: what"."""
    user = _user_of(path)
    if user not in ALLOWED:
        return []
    if source_tree.is_cpp(path):
        how = "includes"
        used = [(line, name.split("/", 1)[0]) for line, name in fences.includes(text)]
    elif source_tree.is_python(path):
        how, used = "imports", _used_by_python(text)
    elif source_tree.is_starlark(path):
        how, used = "depends on", _used_by_starlark(text)
    else:
        return []
    return [
        _violation(path, line, user, name, how)
        for line, name in used
        if not _is_allowed(user, name)
    ]


def check_quoted_includes(path, text, existing):
    """A quoted #include names a file of this repository by its path from the workspace root.

    `existing` is the set of all paths of the tree. Headers from elsewhere are included as <...>.
    """
    if not source_tree.is_cpp(path):
        return []
    workspace = source_tree.workspace_of(path)
    code = cpp_text.without_comments(text)
    violations = []
    for match in _QUOTED_INCLUDE.finditer(code):
        name = match.group(1)
        if name not in existing and f"{workspace}/{name}" not in existing:
            line = code.count("\n", 0, match.start(1)) + 1
            violations.append(f"{path}:{line}: no file {name} from the workspace root")
    return violations
