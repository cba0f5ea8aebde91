"""MoKConfig: how the engine runs. No field changes a bit of any result."""

from __future__ import annotations

import dataclasses

from mok_torch import _C
from mok_torch.scalars import MAX_SIZE, as_choice, as_integer, as_number

_MAX_WORKERS = 1024
_MAX_TIMEOUT_SECONDS = 1e9  # thirty years: what clocks and locks of every kind can count to


@dataclasses.dataclass(frozen=True)
class MoKConfig:
    """How the engine runs; every field has a good default and none changes a bit of any result.

    Ranks and calls may use different configurations. The instance is immutable, hashable and
    printable, and validates itself.

    Attributes:
      fwd_num_comm_sms: workers of the forward that only move rows between ranks (threads on the
        host, SMs on a GPU). 0: the compute workers move them in turn.
      bwd_num_comm_sms: the same for the backward.
      minibatch_size: rows that travel together while the previous minibatch is computed, rounded
        up to row blocks of 128. None: chosen from the shapes.
      macrobatch_size: rows whose activations are kept for the backward, rounded up to row blocks;
        those of the other rows are computed again. None: chosen from the shapes (one rank keeps
        everything). -1: everything, whatever the routing.
      num_threads: compute threads of a rank on the host. None: torch.get_num_threads(), shared by
        the ranks of one process.
      isa: instruction set of the host engine, for example "avx512"; None: the best of this
        machine. The one exception to the rule above: results of two instruction sets may differ in
        the last bits, so all ranks must take the same one.
      timeout_seconds: how long a rank waits for another one in a pass or a schedule before it
        raises RankTimeoutError. Long enough for a rank that compiles or saves a checkpoint while
        the others wait, and longer than the longest pass of any rank: on GPUs the waits inside a
        pass have bounds that are multiples of it. Read when a workspace is created.
      num_sms: SMs that a pass occupies on a GPU, those for exchange only included. None: all. Fewer
        leave room for other kernels, see "On GPUs" in mok_torch/README.md. Ignored on the host.
    """

    fwd_num_comm_sms: int = 0
    bwd_num_comm_sms: int = 0
    minibatch_size: int | None = None
    macrobatch_size: int | None = None
    num_threads: int | None = None
    isa: str | None = None
    timeout_seconds: float = 300.0
    num_sms: int | None = None

    def __post_init__(self):
        self._set_integer("fwd_num_comm_sms", 0, _MAX_WORKERS)
        self._set_integer("bwd_num_comm_sms", 0, _MAX_WORKERS)
        self._set_integer("num_sms", 1, _MAX_WORKERS, optional=True)
        self._check_num_comm_sms()
        self._set_integer("minibatch_size", 1, MAX_SIZE, optional=True)
        self._set_integer("macrobatch_size", -1, MAX_SIZE, optional=True)
        if self.macrobatch_size == 0:
            raise ValueError(f"macrobatch_size: expected -1 or 1 to {MAX_SIZE}, got 0")
        self._set_integer("num_threads", 1, _MAX_WORKERS, optional=True)
        as_choice("isa", self.isa, _C.ISA_NAMES, optional=True)
        timeout = as_number("timeout_seconds", self.timeout_seconds)
        if not 0 < timeout <= _MAX_TIMEOUT_SECONDS:
            raise ValueError(
                f"timeout_seconds: expected a number > 0 and <= {_MAX_TIMEOUT_SECONDS:g}, "
                f"got {timeout}"
            )
        object.__setattr__(self, "timeout_seconds", timeout)

    def _set_integer(self, name: str, lowest: int, highest: int, optional: bool = False):
        value = as_integer(name, getattr(self, name), lowest, highest, optional=optional)
        object.__setattr__(self, name, value)

    def _check_num_comm_sms(self):
        if self.num_sms is None:
            return
        for name in ("fwd_num_comm_sms", "bwd_num_comm_sms"):
            if getattr(self, name) >= self.num_sms:
                raise ValueError(
                    f"{name}: expected fewer than num_sms = {self.num_sms}, got "
                    f"{getattr(self, name)}"
                )
