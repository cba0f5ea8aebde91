"""What GPUs take beyond what CPUs do: determinism, and a CUDA graph of the training step."""

import os
from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[[Tensor], tuple[Tensor, ...]]


def repeat_bit_for_bit() -> None:
    """Makes PyTorch choose kernels that repeat their bits. Before anything runs on the GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Uninitialised memory is not read here; filling it would cost more than the step.
    torch.utils.deterministic.fill_uninitialized_memory = False


def to_device(batch: Tensor, device: torch.device) -> Tensor:
    """The batch there; a copy to a GPU is queued, and the host does not wait for it."""
    if device.type == "cpu":
        return batch
    return batch.pin_memory().to(device, non_blocking=True)


class GraphedStep:
    """A training step that is a CUDA graph from its fourth call on: one launch for all its kernels.

    Every call is a step of the training, also those before the capture, which itself runs nothing.
    What the step reads and keeps (weights, optimizer state, router biases, the learning rate) has
    to live in tensors that stay where they are; the batch is copied to such a place.

    Args:
      step: from a batch to tensors; waits for nothing.
    """

    _WARM_UPS = 3  # lets libraries, workspaces and the optimizer allocate what they keep

    def __init__(self, step: Step):
        self._step = step
        self._calls = 0
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batch: Tensor) -> tuple[Tensor, ...]:
        self._calls += 1
        if self._calls <= self._WARM_UPS:
            return self._warm_up(batch)
        if self._graph is None:
            self._capture(batch)
        self._batch.copy_(batch)
        self._graph.replay()
        # The next replay overwrites the results.
        return tuple(result.clone() for result in self._results)

    def _warm_up(self, batch: Tensor) -> tuple[Tensor, ...]:
        """Beside the default stream, whose autograd nodes cannot be captured."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            results = self._step(batch)
        current.wait_stream(self._stream)
        return results

    def _capture(self, batch: Tensor) -> None:
        self._batch = batch.clone()
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # thread_local: NCCL's watchdog may query events meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._results = self._step(self._batch)
