"""Python rules of MoK. Modules are imported by their path from the workspace root.

The packages of third_party/python/requirements.txt are importable in every target: no deps needed.
"""

load("//tools/cc:defs.bzl", "cc_binary")

_PYBIND11 = Label("@target_python//:pybind11")
_PYTEST_MAIN = Label("//tools/py:pytest_main.py")
_STAMP = Label("@python_env//:stamp")

def py_library(name, **kwargs):
    """native.py_library for Python 3."""
    native.py_library(name = name, srcs_version = "PY3", **kwargs)

def py_binary(name, **kwargs):
    """native.py_binary for Python 3."""
    native.py_binary(name = name, python_version = "PY3", srcs_version = "PY3", **kwargs)

def py_test(name, data = [], size = "small", **kwargs):
    """A test that is a program (absltest and the like); its exit status is the result.

    A test of more than half a minute on an idle machine says size = "medium".
    """
    native.py_test(
        name = name,
        size = size,
        data = data + [_STAMP],
        python_version = "PY3",
        srcs_version = "PY3",
        **kwargs
    )

def pytest_test(name, srcs, args = [], **kwargs):
    """Runs the test files in srcs through pytest; honours shard_count and --test_filter."""
    py_test(
        name = name,
        srcs = srcs + [_PYTEST_MAIN],
        main = _PYTEST_MAIN,
        args = ["$(rootpath %s)" % source for source in srcs] + args,
        **kwargs
    )

def pybind_extension(name, srcs, deps = [], copts = [], imports = [], visibility = None, **kwargs):
    """An extension module <name>.so in this package, and a py_library <name> that carries it.

    It is built for @target_python, which is the Python that runs the tests unless
    MOK_TARGET_PYTHON_HEADERS names another one.
    """
    cc_binary(
        name = name + ".so",
        srcs = srcs,
        copts = ["-fvisibility=hidden"] + copts,
        linkshared = True,
        linkstatic = True,
        visibility = ["//visibility:private"],
        deps = deps + [_PYBIND11],
        **kwargs
    )
    py_library(
        name = name,
        data = [":" + name + ".so"],
        imports = imports,
        visibility = visibility,
    )
