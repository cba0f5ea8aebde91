"""The shared library as Python sees it; no GPU is needed for errors."""

import ctypes
import pathlib

import pytest

from benchmarks.grouped_gemm import library


def test_errors_reach_python():
    path = pathlib.Path(library.__file__).parent / "libgrouped_gemm.so"
    loaded = library.Library(str(path))
    plan = ctypes.c_void_p()
    args = library.Args()
    with pytest.raises(RuntimeError, match="InvalidArgument: a: expected a pointer, got null"):
        loaded.require(
            loaded.functions.mok_grouped_gemm_create(ctypes.byref(args), ctypes.byref(plan))
        )
