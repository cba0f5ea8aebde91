"""C++ rules of MoK: C++20, all warnings are errors.

All includes are relative to the workspace root: #include "mok_core/status.h". Bazel passes the
root of each repository as a quote include, so the same line works in a workspace that uses @mok.
`copts` come after the common ones: per-ISA code is one cc_library per ISA, for example
cc_library(name = "gemm_avx512", copts = ["-mavx512f"], ...).
"""

COMMON_COPTS = ["-std=c++20", "-Wall", "-Wextra", "-Werror"]

# A Label of this file's repository: it means the same googletest in a workspace that uses @mok.
_GTEST_MAIN = Label("@googletest//:gtest_main")

def cc_library(name, copts = [], **kwargs):
    """native.cc_library with MoK's compiler options."""
    native.cc_library(name = name, copts = COMMON_COPTS + copts, **kwargs)

def cc_binary(name, copts = [], **kwargs):
    """native.cc_binary with MoK's compiler options."""
    native.cc_binary(name = name, copts = COMMON_COPTS + copts, **kwargs)

def cc_test(name, copts = [], deps = [], size = "small", **kwargs):
    """native.cc_test with MoK's compiler options and googletest, googlemock and their main().

    A test of more than half a minute on an idle machine says size = "medium".
    Tag tests of threads, counters and barriers "concurrency" (CI runs those under sanitizers), and
    a test that no sanitizer can run "nosanitizer".
    """
    native.cc_test(
        name = name,
        size = size,
        copts = COMMON_COPTS + copts,
        deps = deps + [_GTEST_MAIN],
        **kwargs
    )
