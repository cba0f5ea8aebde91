"""Trains a small mixture-of-experts language model on text that ships with Python.

    ./bazelw run //examples:train_lm                 # 2 ranks, about two minutes on 2 cores
    ./bazelw run //examples:train_lm -- --ranks=4 --steps=50
    ./bazelw run //examples:train_lm -- --device=cuda            # one rank a GPU
    torchrun --nproc-per-node=2 -m examples.train_lm.train_lm --device=cuda

The ranks are processes of this machine; each holds a share of the experts and of every batch. The
same seed gives the same losses bit for bit.
"""

import dataclasses
import math
import os
import statistics
import sys
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
from examples.train_lm.model import SIZES, LanguageModel, ModelConfig
from examples.train_lm.report import plot
from examples.train_lm.trainer import Settings, train_or_exit
from mok_torch import MoKConfig
from mok_torch.full_state import load_full_state_dict

_OUTPUT = os.path.join(tempfile.gettempdir(), "train_lm")

_DEVICE = flags.DEFINE_enum("device", "cpu", ["cpu", "cuda"], "Where the ranks train.")
_RANKS = flags.DEFINE_integer(
    "ranks", None, "Processes that share the experts; default: 2, or one a GPU.", lower_bound=1
)
_SIZE = flags.DEFINE_enum(
    "size", None, SIZES, "Of the model; default: small on CPUs, medium on GPUs."
)
_EXPERTS = flags.DEFINE_integer(
    "experts",
    None,
    "Routed experts of each layer; default: the size's.",
    lower_bound=ModelConfig.top_k,
)
_STEPS = flags.DEFINE_integer("steps", 400, "Optimizer steps.", lower_bound=1)
_BATCH = flags.DEFINE_integer(
    "batch",
    None,
    "Sequences of a step, over all ranks; default: 8, on GPUs or of size medium 32.",
    lower_bound=1,
)
_SEQUENCES_AT_ONCE = flags.DEFINE_integer(
    "sequences_at_once",
    None,
    "Sequences that attention and the like take at a time; default: the size's. Bits depend on it, "
    "but not on the number of ranks.",
    lower_bound=1,
)
_CUDA_GRAPH = flags.DEFINE_bool("cuda_graph", True, "On GPUs, replay a step as one CUDA graph.")
_PRECISION = flags.DEFINE_enum("precision", "bf16", ["bf16", "fp32"], "Of the MoE layers.")
_SEED = flags.DEFINE_integer(
    "seed", 0, "Of the weights and of the order of the text.", lower_bound=0, upper_bound=2**63 - 1
)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 2e-3, "The largest of the schedule.")
_TIMEOUT_S = flags.DEFINE_float(
    "timeout_s",
    MoKConfig.timeout_seconds,
    "Seconds that a rank waits for another one before the training ends with an error.",
    lower_bound=1,
)
_LOSS_LOG = flags.DEFINE_string("loss_log", None, "File for one JSON object a step.")
_CHECKPOINT = flags.DEFINE_string("checkpoint", _OUTPUT + ".pt", "Where the trained model goes.")
_PLOT = flags.DEFINE_string("plot", _OUTPUT + ".png", "Where the loss and load curves go.")
_SAMPLE = flags.DEFINE_integer("sample", 300, "Bytes of text to generate; 0: none.", lower_bound=0)

_PROMPT = b"The statement "
_PLOT_FORMATS = (".png", ".pdf", ".svg")


def output_path(path: str | None) -> str | None:
    """Relative to where the user is: `bazel run` starts the program somewhere else."""
    return path and os.path.join(os.environ.get("BUILD_WORKING_DIRECTORY", ""), path)


def num_ranks() -> int:
    """Of --ranks, of torchrun, or of the GPUs."""
    default = 2 if _DEVICE.value == "cpu" else torch.cuda.device_count()
    return ranks.num_ranks(_RANKS.value or default)


def model_config() -> ModelConfig:
    """What the flags ask for."""
    size = _SIZE.value or ("small" if _DEVICE.value == "cpu" else "medium")
    given = {"experts": _EXPERTS.value, "sequences_at_once": _SEQUENCES_AT_ONCE.value}
    given = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(SIZES[size], precision=_PRECISION.value, **given)


def batch_of_step() -> int:
    """Sequences of a step, over all ranks."""
    small = _DEVICE.value == "cpu" and _SIZE.value in (None, "small")
    return _BATCH.value or (8 if small else 32)


def check_batch(_: int | None) -> bool:
    """Validator of --batch, --ranks and --sequences_at_once; of these it names what was given.

    (Validators run when all flags have values.)
    """
    batch, count, at_once = batch_of_step(), num_ranks(), model_config().sequences_at_once
    if count == 0 or batch % (count * at_once) == 0:
        return True  # count 0: check_device says that there is no GPU
    given = {
        "--batch": _BATCH.value,
        ranks.count_flag(): count if ranks.launched_by_torchrun() else _RANKS.value,
        "--sequences_at_once": _SEQUENCES_AT_ONCE.value,
    }
    named = ", ".join(f"{flag}={value}" for flag, value in given.items() if value is not None)
    groups = "" if at_once == 1 else f" times {at_once} at once (--sequences_at_once)"
    most = batch if _DEVICE.value == "cpu" else torch.cuda.device_count()
    fitting = {
        "--batch": f"{count * at_once} or a multiple",
        ranks.count_flag(): [n for n in range(1, most + 1) if batch % (n * at_once) == 0],
        "--sequences_at_once": [n for n in range(1, batch + 1) if batch % (n * count) == 0],
    }
    if at_once == 1:
        del fitting["--sequences_at_once"]
    fits = [f"{flag} of {str(values).strip('[]')}" for flag, values in fitting.items() if values]
    raise flags.IllegalFlagValueError(
        f"{named or f'one rank a GPU, {count} GPUs'}: a step's {batch} sequences (--batch) must be "
        f"a multiple of {count} ranks{groups}. What fits: {'; '.join(fits)}"
    )


def check_experts(experts: int | None) -> bool:
    """Validator of --experts."""
    top_k = model_config().top_k
    if experts is not None and experts < top_k:
        raise flags.ValidationError(
            f"must be at least the {top_k} that a token of this size visits"
        )
    return True


def check_device(device: str) -> bool:
    """Validator of --device."""
    if device == "cuda" and num_ranks() == 0:
        raise flags.ValidationError("PyTorch finds no GPU")
    if device == "cuda" and num_ranks() > torch.cuda.device_count():
        raise flags.ValidationError(f"{num_ranks()} ranks, but {torch.cuda.device_count()} GPUs")
    if device == "cuda" and _PRECISION.value != "bf16":
        raise flags.ValidationError("expected --precision=bf16")
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
    if not flag_value:
        raise flags.ValidationError("must name a file")
    folder = os.path.dirname(path) or os.curdir
    if not os.path.isdir(folder):
        raise flags.ValidationError(f"there is no folder {folder}")
    if os.path.isdir(path):
        raise flags.ValidationError(f"must be a file, but {path} is a folder")
    target = path if os.path.exists(path) else folder
    if not os.access(target, os.W_OK):
        raise flags.ValidationError(f"{target} is not writable")
    return True


def check_plot(path: str | None) -> bool:
    """Validator of --plot, beside check_output."""
    if path is not None and os.path.splitext(path)[1] not in _PLOT_FORMATS:
        raise flags.ValidationError(f"must end in {', '.join(_PLOT_FORMATS)}, got {path}")
    return True


def check_timeout(seconds: float) -> bool:
    """Validator of --timeout_s."""
    try:
        MoKConfig(timeout_seconds=seconds)
    except ValueError as error:
        raise flags.ValidationError(str(error)) from error
    return True


def check_outputs(paths: dict[str, str | None]) -> bool:
    """Validator of --checkpoint, --plot and --loss_log together: one would overwrite another."""
    flag_of_file = {}
    for flag, path in paths.items():
        if not path:
            continue
        file = os.path.realpath(output_path(path))
        if file in flag_of_file:
            both = f"--{flag_of_file[file]} and --{flag}"
            raise flags.IllegalFlagValueError(f"{both} must name different files, not both {file}")
        flag_of_file[file] = flag
    return True


def generate(checkpoint: dict, length: int, seed: int, device: str) -> str:
    """A sample of text, from one rank that holds every expert of the checkpoint."""
    torch.set_num_threads(1)
    model = LanguageModel(ModelConfig(**checkpoint["config"]))
    load_full_state_dict(model, checkpoint["model"])
    prompt = torch.tensor(list(_PROMPT), device=device)
    generator = torch.Generator().manual_seed(seed)
    text = model.to(device).generate(prompt, length, generator)
    return bytes(text.tolist()).decode(errors="replace")


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected arguments: {arguments[1:]}")
    begin = time.perf_counter()
    settings = Settings(
        model=model_config(),
        ranks=num_ranks(),
        steps=_STEPS.value,
        batch=batch_of_step(),
        seed=_SEED.value,
        learning_rate=_LEARNING_RATE.value,
        loss_log=output_path(_LOSS_LOG.value),
        checkpoint=output_path(_CHECKPOINT.value),
        device=_DEVICE.value,
        cuda_graph=_DEVICE.value == "cuda" and _CUDA_GRAPH.value,
        timeout_s=_TIMEOUT_S.value,
    )
    console = rich.console.Console(quiet=not ranks.leads())
    text = python_help_text()
    corpus = Corpus.from_text(text)
    console.print(
        f"{len(corpus.train)} bytes to train on, {len(corpus.validation)} to validate; "
        f"{settings.ranks} ranks, {settings.model}",
        highlight=False,
    )
    options = {"device": settings.device, "timeout_s": settings.timeout_s}
    if ranks.launched_by_torchrun():
        ranks.work_as_rank(train_or_exit, settings, **options)
    else:
        try:
            ranks.launch(train_or_exit, settings.ranks, settings, **options)
        except torch.multiprocessing.ProcessExitedException as error:
            if error.exit_code >= 0:
                sys.exit(error.exit_code)  # the rank has said why
            sys.exit(f"rank {error.error_index} was killed by signal {-error.exit_code}")
        finally:
            console.show_cursor()  # which a rank's progress bar hides
    if ranks.leads():
        show_result(console, settings, unigram_entropy(text), begin)


def show_result(console: rich.console.Console, settings: Settings, unigram: float, begin: float):
    """The plot, a sample and the table; begin: of the program, by time.perf_counter."""
    checkpoint = torch.load(settings.checkpoint)
    history, validation = checkpoint["history"], checkpoint["validation_loss"]
    plot(output_path(_PLOT.value), history, unigram, validation)
    if _SAMPLE.value:
        sample = generate(checkpoint, _SAMPLE.value, settings.seed, settings.device)
        console.print(rich.panel.Panel(rich.markup.escape(sample), title="sample"))
    rate = statistics.median(record["tokens_per_s"] for record in history)
    table = rich.table.Table("result", rich.table.Column("value", overflow="fold"))
    table.add_row("unigram entropy of the text", f"{unigram:.4f} nats per byte")
    table.add_row("validation loss", f"{validation:.4f} nats per byte")
    table.add_row(
        "first and last training loss", f"{history[0]['loss']:.4f}, {history[-1]['loss']:.4f}"
    )
    table.add_row("tokens per second (median)", f"{rate:.0f}")
    table.add_row("SHA-256 of the weights, begin", checkpoint["digest"][:32])
    table.add_row("checkpoint", settings.checkpoint)
    table.add_row("plot", output_path(_PLOT.value))
    table.add_row("time", f"{time.perf_counter() - begin:.0f} s")
    console.print(table)


if __name__ == "__main__":
    flags.register_validator("device", check_device)
    flags.register_validator("batch", check_batch)
    flags.register_validator("experts", check_experts)
    flags.register_validator("plot", check_plot)
    flags.register_validator("learning_rate", check_learning_rate)
    flags.register_validator("timeout_s", check_timeout)
    outputs = ("loss_log", "checkpoint", "plot")
    for output in outputs:
        flags.register_validator(output, check_output)
    flags.register_multi_flags_validator(outputs, check_outputs)
    with ranks.interruptible("train_lm"):
        app.run(main)
