"""The files that the lint tests look at: every file below the workspace root, not a list of them.

A new file cannot be missed. Skipped are dot folders, Bazel's links and Python's caches.
"""

import os
import pathlib

CPP_SUFFIXES = (".cc", ".cu", ".cuh", ".h", ".inc")
STARLARK_NAMES = ("BUILD", "BUILD.bazel", "MODULE.bazel", "WORKSPACE", "WORKSPACE.bzlmod")

# Folders with a workspace of their own; their include paths and labels start there.
NESTED_WORKSPACES = ("examples/custom_kernel",)


def workspace_root():
    """The real source tree: the test's MODULE.bazel is a link into it."""
    return pathlib.Path("MODULE.bazel").resolve().parent


def _is_skipped(name):
    return name.startswith((".", "bazel-")) or name == "__pycache__"


def source_files(root):
    """Yields the paths of all source files, relative to root and with forward slashes, sorted."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not _is_skipped(name))
        for name in sorted(files):
            path = pathlib.Path(folder, name)
            if not _is_skipped(name) and path.is_file():
                yield path.relative_to(root).as_posix()


def workspace_of(path):
    """The nested workspace that a path lies in, or "" for the main one."""
    for nested in NESTED_WORKSPACES:
        if path.startswith(nested + "/"):
            return nested
    return ""


def is_cpp(path):
    return path.endswith(CPP_SUFFIXES)


def is_python(path):
    return path.endswith(".py")


def is_starlark(path):
    return path.endswith(".bzl") or path.rsplit("/", 1)[-1] in STARLARK_NAMES


def read(root, path):
    return pathlib.Path(root, path).read_text(encoding="utf-8")
