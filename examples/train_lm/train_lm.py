"""Trains a small mixture-of-experts language model on text that ships with Python.

    ./bazelw run //examples:train_lm                 # 2 ranks, about two minutes on 2 cores
    ./bazelw run //examples:train_lm -- --ranks=4 --steps=50

The ranks are processes of this machine; each holds a share of the experts and of every batch. The
same seed gives the same losses bit for bit.
"""

import math
import os
import tempfile
import time

import rich.console
import rich.markup
import rich.panel
import rich.table
import torch
from absl import app, flags

from examples.train_lm import ranks
from examples.train_lm.data import Corpus, python_help_text, unigram_entropy
from examples.train_lm.model import LanguageModel, ModelConfig
from examples.train_lm.report import plot
from examples.train_lm.trainer import Settings, train
from mok_torch.full_state import load_full_state_dict

_OUTPUT = os.path.join(tempfile.gettempdir(), "train_lm")

_RANKS = flags.DEFINE_integer("ranks", 2, "Processes that share the experts.", lower_bound=1)
_EXPERTS = flags.DEFINE_integer(
    "experts", 16, "Routed experts of each layer.", lower_bound=ModelConfig.top_k
)
_STEPS = flags.DEFINE_integer("steps", 400, "Optimizer steps.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 8, "Sequences of a step, over all ranks.", lower_bound=1)
_PRECISION = flags.DEFINE_enum("precision", "bf16", ["bf16", "fp32"], "Of the MoE layers.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the weights and of the order of the text.")
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 2e-3, "The largest of the schedule.")
_LOSS_LOG = flags.DEFINE_string("loss_log", None, "File for one JSON object a step.")
_CHECKPOINT = flags.DEFINE_string("checkpoint", _OUTPUT + ".pt", "Where the trained model goes.")
_PLOT = flags.DEFINE_string("plot", _OUTPUT + ".png", "Where the loss and load curves go.")
_SAMPLE = flags.DEFINE_integer("sample", 300, "Bytes of text to generate; 0: none.", lower_bound=0)

_PROMPT = b"The statement "


def output_path(path: str | None) -> str | None:
    """Relative to where the user is: `bazel run` starts the program somewhere else."""
    return path and os.path.join(os.environ.get("BUILD_WORKING_DIRECTORY", ""), path)


def check_batch(batch: int) -> bool:
    """Validator of --batch. (Validators run when all flags have values.)"""
    if batch % _RANKS.value:
        raise flags.ValidationError(
            f"must be a multiple of --ranks: {batch} sequences, {_RANKS.value} ranks"
        )
    return True


def check_learning_rate(rate: float) -> bool:
    """Validator of --learning_rate."""
    if not 0 < rate < math.inf:
        raise flags.ValidationError(f"must be finite and > 0, got {rate}")
    return True


def check_output(flag_value: str | None) -> bool:
    """Validator of the flags that name a file to write: not after the training only."""
    path = output_path(flag_value)
    if path is None:
        return True
    folder = os.path.dirname(path) or os.curdir
    if not os.path.isdir(folder):
        raise flags.ValidationError(f"there is no folder {folder}")
    if os.path.isdir(path):
        raise flags.ValidationError(f"must be a file, but {path} is a folder")
    target = path if os.path.exists(path) else folder
    if not os.access(target, os.W_OK):
        raise flags.ValidationError(f"{target} is not writable")
    return True


def generate(checkpoint: dict, length: int, seed: int) -> str:
    """A sample of text, from one rank that holds every expert of the checkpoint."""
    torch.set_num_threads(1)
    model = LanguageModel(ModelConfig(**checkpoint["config"]))
    load_full_state_dict(model, checkpoint["model"])
    prompt = torch.tensor(list(_PROMPT))
    generator = torch.Generator().manual_seed(seed)
    return bytes(model.generate(prompt, length, generator).tolist()).decode(errors="replace")


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected arguments: {arguments[1:]}")
    begin = time.perf_counter()
    console = rich.console.Console()
    text = python_help_text()
    corpus = Corpus.from_text(text)
    unigram = unigram_entropy(text)
    settings = Settings(
        model=ModelConfig(experts=_EXPERTS.value, precision=_PRECISION.value),
        ranks=_RANKS.value,
        steps=_STEPS.value,
        batch=_BATCH.value,
        seed=_SEED.value,
        learning_rate=_LEARNING_RATE.value,
        loss_log=output_path(_LOSS_LOG.value),
        checkpoint=output_path(_CHECKPOINT.value),
    )
    console.print(
        f"{len(corpus.train)} bytes to train on, {len(corpus.validation)} to validate; "
        f"{settings.ranks} ranks, {settings.model}",
        highlight=False,
    )
    ranks.launch(train, settings.ranks, settings)

    checkpoint = torch.load(settings.checkpoint)
    validation = checkpoint["validation_loss"]
    plot(output_path(_PLOT.value), checkpoint["history"], unigram, validation)
    if _SAMPLE.value:
        sample = generate(checkpoint, _SAMPLE.value, settings.seed)
        console.print(rich.panel.Panel(rich.markup.escape(sample), title="sample"))
    table = rich.table.Table("result", "value")
    table.add_row("unigram entropy of the text", f"{unigram:.4f} nats per byte")
    table.add_row("validation loss", f"{validation:.4f} nats per byte")
    table.add_row("first and last training loss", _first_and_last(checkpoint["history"]))
    table.add_row("checkpoint", settings.checkpoint)
    table.add_row("plot", output_path(_PLOT.value))
    table.add_row("time", f"{time.perf_counter() - begin:.0f} s")
    console.print(table)


def _first_and_last(history: list[dict]) -> str:
    return f"{history[0]['loss']:.4f}, {history[-1]['loss']:.4f}"


if __name__ == "__main__":
    flags.register_validator("batch", check_batch)
    flags.register_validator("learning_rate", check_learning_rate)
    for output in ("loss_log", "checkpoint", "plot"):
        flags.register_validator(output, check_output)
    app.run(main)
