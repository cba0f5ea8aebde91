"""The shared library as Python sees it; no GPU is needed for errors."""

import ctypes
import pathlib

import pytest

from benchmarks.transport import library


def test_errors_reach_python():
    path = pathlib.Path(library.__file__).parent / "libtransport.so"
    loaded = library.Library(str(path))
    handle = ctypes.c_void_p()
    with pytest.raises(RuntimeError, match="InvalidArgument: device = 99 of"):
        loaded.require(loaded.functions.mok_transport_create(99, ctypes.byref(handle)))
