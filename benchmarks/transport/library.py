"""libtransport.so (transport_api.h) for torch tensors."""

import ctypes

import torch

MECHANISMS = ("bulk", "vector")
SIDES = ("pull", "push")
ARRIVALS = ("untold", "own", "peer")
MAX_RANKS = 8
MAX_WARPS = 16

_COUNTS = (
    *("device", "mechanism", "side", "arrival"),
    *("num_blocks", "warps", "num_rows", "rows_per_tile"),
)


class Args(ctypes.Structure):
    """MokTransportArgs."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in _COUNTS),
        ("row_bytes", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("rank", "row", "local", "counters")),
        *((name, ctypes.c_void_p * MAX_RANKS) for name in ("of_rank", "counters_of_rank")),
    ]


class Library:
    """The loaded shared library."""

    def __init__(self, path: str):
        self.functions = ctypes.CDLL(path)
        self.functions.mok_transport_error.restype = ctypes.c_char_p
        self.functions.mok_transport_destroy.restype = None
        pointer, integer = ctypes.c_void_p, ctypes.c_int32
        self.functions.mok_transport_launch.argtypes = [pointer] * 3
        ping_pong = [pointer, pointer, pointer, integer, integer, pointer]
        self.functions.mok_transport_ping_pong.argtypes = ping_pong
        for name in ("check", "destroy"):
            getattr(self.functions, f"mok_transport_{name}").argtypes = [pointer]

    def require(self, code: int) -> None:
        if code:
            raise RuntimeError(self.functions.mok_transport_error().decode())


class CopyEngine:
    """Copies by the copy engine of the stream's device; torch's copy_ always takes the source's."""

    def __init__(self):
        self._copy = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]

    def copy(self, to: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """The stream's device is current; `to` and `source` are contiguous and of one size."""
        code = self._copy(to.data_ptr(), source.data_ptr(), source.nbytes, stream.cuda_stream)
        if code:
            raise RuntimeError(f"cuMemcpyAsync: CUresult {code}")


class Transport:
    """The kernels on one GPU."""

    def __init__(self, library: Library, device: int):
        self._library = library
        self._handle = ctypes.c_void_p()
        functions = library.functions
        library.require(functions.mok_transport_create(device, ctypes.byref(self._handle)))

    def launch(self, args: Args, stream: torch.cuda.Stream) -> None:
        functions = self._library.functions
        code = functions.mok_transport_launch(
            self._handle, ctypes.addressof(args), stream.cuda_stream
        )
        self._library.require(code)

    def ping_pong(
        self, own: torch.Tensor, peer: torch.Tensor, rounds: int, begins: bool, stream
    ) -> None:
        functions = self._library.functions
        code = functions.mok_transport_ping_pong(
            self._handle, own.data_ptr(), peer.data_ptr(), rounds, begins, stream.cuda_stream
        )
        self._library.require(code)

    def check(self) -> None:
        """Raises if a wait inside a finished launch has run out of time."""
        self._library.require(self._library.functions.mok_transport_check(self._handle))

    def __del__(self):
        if self._handle:
            self._library.functions.mok_transport_destroy(self._handle)
