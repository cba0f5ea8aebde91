"""Exceptions of MoK. Wrong arguments raise the built-in ValueError and TypeError."""

from __future__ import annotations

from mok_torch import _C


class RankTimeoutError(RuntimeError, TimeoutError):
    """A rank did not come to a collective call within the workspace's timeout.

    The text names the missing ranks. The workspace is unusable afterwards: its later calls raise
    this error again. Make a new one once the ranks are back.
    """


class ResourceExhaustedError(MemoryError):
    """Memory or shared memory (/dev/shm) ran out; the text says how much was wanted and free."""


# Classes that an error keeps on its way to other ranks, with what carries it through the engine.
_SHARED = (
    (NotImplementedError, NotImplementedError, _C.UNIMPLEMENTED),
    (TypeError, TypeError, _C.TYPE_MISMATCH),
    (ValueError, ValueError, _C.INVALID_ARGUMENT),
    (MemoryError, ResourceExhaustedError, _C.RESOURCE_EXHAUSTED),
)


def as_shared_error(error: Exception) -> tuple[Exception, int]:
    """The error as the other ranks raise it, and its status code.

    Another process may not have the error's class, or not be able to make one from a text: what is
    none of the classes above becomes a RuntimeError that names its class.
    """
    for kind, shared, code in _SHARED:
        if isinstance(error, kind):
            return shared(str(error)), code
    text = str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}"
    return RuntimeError(text), _C.INTERNAL


def error_of_code(code: int, text: str) -> Exception:
    """What as_shared_error made the code of."""
    for _, shared, shared_code in _SHARED:
        if code == shared_code:
            return shared(text)
    return RuntimeError(text)
