"""libgrouped_gemm.so (grouped_gemm_api.h) for torch tensors."""

import ctypes

import torch

_POINTERS = ("a", "expert_begin", "expert_count", "weights", "weights_up", "out", "gate", "up")


class Args(ctypes.Structure):
    """MokGroupedGemmArgs."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("device", "swiglu", "column_order", "num_blocks")),
        ("max_panel_blocks", ctypes.c_int32),
        ("swiglu_limit", ctypes.c_float),
        *((name, ctypes.c_int64) for name in ("rows", "k", "width", "experts")),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    ]


class Library:
    """The loaded shared library."""

    def __init__(self, path: str):
        self.functions = ctypes.CDLL(path)
        self.functions.mok_grouped_gemm_error.restype = ctypes.c_char_p
        self.functions.mok_grouped_gemm_destroy.restype = None
        for name in ("launch", "check", "destroy"):
            getattr(self.functions, f"mok_grouped_gemm_{name}").argtypes = [ctypes.c_void_p]
        self.functions.mok_grouped_gemm_launch.argtypes *= 2

    def require(self, code: int) -> None:
        if code:
            raise RuntimeError(self.functions.mok_grouped_gemm_error().decode())


class GroupedGemm:
    """One problem, ready to launch on the current stream.

    tensors: a [rows, k], expert_begin and expert_count [experts] int32, out [rows, width] and
    weights [experts, width, k]; with weights_up also gate and up: the SwiGLU form.
    """

    def __init__(self, library: Library, permuted: bool = True, panel: int = 0, **tensors):
        self._library, self._tensors = library, tensors
        self._plan = ctypes.c_void_p()
        a, weights = tensors["a"], tensors["weights"]
        args = Args(
            device=a.device.index,
            swiglu="weights_up" in tensors,
            column_order=permuted,
            num_blocks=torch.cuda.get_device_properties(a.device).multi_processor_count,
            max_panel_blocks=panel,
            swiglu_limit=float("inf"),
            rows=a.shape[0],
            k=a.shape[1],
            width=weights.shape[1],
            experts=weights.shape[0],
            **{name: tensors[name].data_ptr() for name in _POINTERS if name in tensors},
        )
        functions = library.functions
        library.require(
            functions.mok_grouped_gemm_create(ctypes.byref(args), ctypes.byref(self._plan))
        )

    def __call__(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self._library.require(self._library.functions.mok_grouped_gemm_launch(self._plan, stream))

    def check(self) -> None:
        """Raises if a wait inside a finished launch has run out of time."""
        self._library.require(self._library.functions.mok_grouped_gemm_check(self._plan))

    def __del__(self):
        self._library.functions.mok_grouped_gemm_destroy(self._plan)
