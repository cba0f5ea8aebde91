"""Real English text that every Python brings along: the pages behind help("topics"), as bytes."""

import collections
import dataclasses
import math

import torch
from torch import Tensor

_VALIDATION_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The text, cut into a training part and, at its end, a validation part; uint8 [bytes]."""

    train: Tensor
    validation: Tensor

    @classmethod
    def from_text(cls, text: bytes) -> "Corpus":
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        cut = int(len(tokens) * (1 - _VALIDATION_SHARE))
        return cls(tokens[:cut], tokens[cut:])

    def batch(self, generator: torch.Generator, sequences: int, context: int) -> Tensor:
        """Random windows of the training part, int64 [sequences, context + 1].

        Every rank draws the same windows from a generator with the same seed and keeps its own.
        """
        last = len(self.train) - context - 1
        starts = torch.randint(last + 1, (sequences,), generator=generator)
        return self.train[starts.unsqueeze(1) + torch.arange(context + 1)].long()

    def validation_windows(self, sequences: int, context: int) -> Tensor:
        """The first windows of the validation part, side by side, int64 [sequences, context + 1].

        Each begins with the last byte of the one before it, so that every byte is predicted once.
        """
        fitting = (len(self.validation) - 1) // context
        starts = torch.arange(min(sequences, fitting)) * context
        return self.validation[starts.unsqueeze(1) + torch.arange(context + 1)].long()


def python_help_text() -> bytes:
    """The text of pydoc_data.topics: about half a megabyte about the Python language."""
    from pydoc_data import topics

    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()


def unigram_entropy(text: bytes) -> float:
    """Nats per byte that a model pays that knows only how frequent each byte is."""
    counts = collections.Counter(text)
    return -sum(n / len(text) * math.log(n / len(text)) for n in counts.values())
