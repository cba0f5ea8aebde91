"""Every external repository of MoK, for WORKSPACE and MODULE.bazel mode, and for consumers."""

load("//third_party/cuda:cuda_repository.bzl", "cuda_repository")
load("//third_party/cutlass:cutlass_repository.bzl", "cutlass_repository")
load("//third_party/googletest:googletest_repository.bzl", "googletest_repository")
load("//third_party/python:python_env.bzl", "python_env")
load("//third_party/python:target_python.bzl", "target_python")
load("//third_party/stubs:stub_repository.bzl", "stub_repository")

# What Bazel 4's own @bazel_tools loads, and would download if nobody declared it first.
_WORKSPACE_STUBS = ["remote_coverage_tools", "rules_cc", "rules_java"]

def mok_repositories():
    """The repositories that MoK's own targets need (both modes)."""
    python_env(
        name = "python_env",
        requirements = Label("//third_party/python:requirements.txt"),
    )
    target_python(name = "target_python")
    cuda_repository(name = "local_cuda")
    googletest_repository(name = "googletest")
    cutlass_repository(
        name = "cutlass",
        requirements = Label("//third_party/cutlass:requirements.txt"),
    )

def mok_dependencies():
    """WORKSPACE mode: call it first in the WORKSPACE of MoK or of a workspace that uses @mok.

    A stub is declared only where the workspace has not declared that repository itself.
    """
    declared = native.existing_rules()
    for name in _WORKSPACE_STUBS:
        if name not in declared:
            stub_repository(name = name)
    mok_repositories()

def mok_register_toolchains():
    """WORKSPACE mode: MoK's Python toolchain (only Python targets need it)."""
    native.register_toolchains("@mok//tools/py:toolchain")
