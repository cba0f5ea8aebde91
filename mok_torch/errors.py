"""Exceptions of MoK. Wrong arguments raise the built-in ValueError and TypeError."""


class RankTimeoutError(RuntimeError, TimeoutError):
    """A rank did not come to a collective call within the workspace's timeout.

    The text names the missing ranks. The workspace is unusable afterwards: its later calls raise
    this error again. Make a new one once the ranks are back.
    """


class ResourceExhaustedError(MemoryError):
    """Memory or shared memory (/dev/shm) ran out; the text says how much was wanted and free."""
