"""The example keeps its promises: repeatable, independent of the number of ranks, and it learns."""

import dataclasses
import functools
import json
import math
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch
from absl import flags
from absl.testing import flagsaver

from examples.train_lm import ranks, report, train_lm, trainer
from examples.train_lm.data import Corpus, python_help_text, unigram_entropy
from examples.train_lm.model import LanguageModel, ModelConfig
from examples.train_lm.torchrun_test_support import run_two_ranks
from examples.train_lm.trainer import Settings, learning_rate_share, train, validation_loss

SMALL = ModelConfig(
    context=32,
    hidden=32,
    layers=2,
    heads=2,
    experts=6,
    expert_intermediate=24,
    shared_intermediate=16,
)


def run(folder, num_ranks, **options):
    """Losses of a short training."""
    log = folder / f"{num_ranks}.json"
    settings = Settings(
        **{
            "model": SMALL,
            "ranks": num_ranks,
            "steps": 6,
            "batch": 4,
            "seed": 3,
            "learning_rate": 4e-3,
            "loss_log": str(log),
            "checkpoint": str(folder / "model.pt"),
            **options,
        }
    )
    ranks.launch(train, num_ranks, settings)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(settings.steps))
    assert all(record["tokens_per_s"] > 0 for record in records)
    return [record["loss"] for record in records]


def test_same_seed_gives_the_same_losses_and_it_learns(tmp_path):
    losses = run(tmp_path, 2, steps=30)
    assert losses[0] == pytest.approx(math.log(256), abs=0.2)
    assert losses[-1] < 0.75 * losses[0]
    first_model = torch.load(tmp_path / "model.pt")["model"]
    assert run(tmp_path, 2, steps=30) == losses
    second_model = torch.load(tmp_path / "model.pt")["model"]
    assert all(torch.equal(first_model[name], second_model[name]) for name in first_model)


@pytest.mark.parametrize(
    ("precision", "experts", "rank_counts"),
    [
        ("bf16", 6, (2, 4)),
        ("fp32", 2, (4,)),  # two of the ranks have no experts
    ],
)
def test_number_of_ranks_changes_no_bit(tmp_path, precision, experts, rank_counts):
    model = dataclasses.replace(SMALL, precision=precision, experts=experts)
    one = run(tmp_path, 1, model=model)
    for num_ranks in rank_counts:
        assert run(tmp_path, num_ranks, model=model) == one


def test_groups_of_sequences_and_autocast_change_no_promise(tmp_path):
    """What GPUs use, on a CPU: two sequences at a time, dense layers in bf16."""
    model = dataclasses.replace(SMALL, sequences_at_once=2, dense_precision="bf16")
    one = run(tmp_path, 1, model=model, steps=3)
    assert run(tmp_path, 2, model=model, steps=3) == one
    in_fp32 = run(tmp_path, 1, model=dataclasses.replace(SMALL, sequences_at_once=2), steps=3)
    assert in_fp32 != one
    assert in_fp32 == pytest.approx(one, rel=1e-3)


def test_groups_compute_the_same_model():
    torch.manual_seed(0)
    tokens = torch.randint(256, (4, 20))
    losses = []
    for at_once in (1, 2, 4):
        torch.manual_seed(3)
        model = LanguageModel(dataclasses.replace(SMALL, sequences_at_once=at_once))
        loss = model(tokens)
        loss.sum().backward()
        losses.append((loss.detach(), model.blocks[0].attention.qkv.weight.grad))
    for loss, gradient in losses[1:]:
        torch.testing.assert_close(loss, losses[0][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gradient, losses[0][1], rtol=1e-3, atol=1e-4)


def test_program_under_torchrun(tmp_path):
    options = ["--batch=2", "--steps=2", "--experts=4", "--sample=0", f"--plot={tmp_path}/plot.png"]
    options += [f"--{flag}={tmp_path / flag}" for flag in ("checkpoint", "loss_log")]
    result = run_two_ranks(train_lm.__file__, tmp_path, *options)
    assert result.stdout.count("validation loss") == 1  # one rank prints
    assert torch.load(tmp_path / "checkpoint")["digest"][:32] in result.stdout
    assert len((tmp_path / "loss_log").read_text().splitlines()) == 2


def test_a_failing_rank_ends_the_run():
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="rank 1 fails"):
        ranks.launch(fail_on_rank_1, 2)


def fail_on_rank_1(rank):
    if rank == 1:
        raise RuntimeError("rank 1 fails")
    time.sleep(3600)


@pytest.mark.parametrize("ends_by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ranks_do_not_outlive_the_program(tmp_path, ends_by):
    program = multiprocessing.get_context("spawn").Process(
        target=launch_sleepers, args=(str(tmp_path),)
    )
    program.start()
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2:
        assert program.is_alive() and time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(program.pid, ends_by)
    program.join(20)
    assert program.exitcode not in (None, 0)
    rank_pids = [int(path.name) for path in tmp_path.iterdir()]
    while any(is_running(pid) for pid in rank_pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_running(pid):
    return state_and_group(pid)[0] not in ("Z", "gone")


def state_and_group(pid):
    """A letter, and the number of its process group, from /proc."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            state, _, group = file.read().rsplit(")", 1)[1].split()[:3]
            return state, int(group)
    except (FileNotFoundError, ProcessLookupError):
        return "gone", 0


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("while_it", ["starts its ranks", "trains"])
def test_an_interrupt_ends_the_program_in_one_line(tmp_path, num_ranks, while_it):
    flags_given = [f"--ranks={num_ranks}", "--experts=4", f"--plot={tmp_path}/plot.png"]
    flags_given += [f"--{flag}={tmp_path / flag}" for flag in ("checkpoint", "loss_log")]
    environment = os.environ | {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    program = subprocess.Popen(
        [sys.executable, train_lm.__file__, *flags_given],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    log = tmp_path / "loss_log"
    deadline = time.monotonic() + 100
    while len(rank_pids(program.pid)) < num_ranks or (
        while_it == "trains" and not (log.exists() and log.read_text())
    ):
        assert program.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    # A terminal interrupts all. The ranks stay quiet, however late the program comes to end them.
    time.sleep(0.2)
    for pid in rank_pids(program.pid):
        os.kill(pid, signal.SIGINT)
    time.sleep(0.3)
    os.killpg(program.pid, signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    assert (program.returncode, errors) == (130, "train_lm: interrupted\n")
    while pids_in_group(program.pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def pids_in_group(group):
    numbers = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in numbers if is_running(pid) and state_and_group(pid)[1] == group]


def rank_pids(group):
    pids = pids_in_group(group)
    lines = [pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
    return [pid for pid, line in zip(pids, lines, strict=True) if b"spawn_main" in line]


def launch_sleepers(folder):
    ranks.launch(sleep, 2, folder)


def sleep(rank, folder):
    with open(os.path.join(folder, str(os.getpid())), "w", encoding="utf-8"):
        time.sleep(3600)


def test_a_killed_rank_is_named(monkeypatch):
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["train_lm"])
    monkeypatch.setattr(train_lm, "train_or_exit", kill_rank_1)
    with pytest.raises(SystemExit, match="rank 1 was killed by signal 9"):
        train_lm.main(["train_lm"])


def kill_rank_1(rank, settings):
    del settings
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)


@pytest.mark.parametrize("stops_in", ["a sum", "a layer"])
def test_a_stopped_rank_ends_the_run_in_time_and_few_words(monkeypatch, capfd, stops_in):
    """Alive, but it does not answer, as under a debugger or on a machine that swaps."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["train_lm"])
    monkeypatch.setattr(train_lm, "train_or_exit", functools.partial(stop_rank_1, stops_in))
    begin = time.monotonic()
    with flagsaver.flagsaver(ranks=2, batch=2, steps=50, experts=4, timeout_s=5.0):
        with pytest.raises(SystemExit) as end:
            train_lm.main(["train_lm"])
    assert end.value.code == 1 and time.monotonic() - begin < 120
    lines = [line for line in capfd.readouterr().err.splitlines() if "Terminating" not in line]
    (complaint,) = (line for line in lines if line.startswith("train_lm: rank 0"))
    named = "ranks [1] of the process group" if stops_in == "a layer" else "another rank is gone"
    assert named in complaint
    assert complaint.endswith("(--timeout_s=5)")
    assert len(lines) < 10, lines


def stop_rank_1(stops_in, rank, settings):
    if rank == 1:
        module, name = (
            (ranks, "sum_gradients") if stops_in == "a sum" else (trainer, "LanguageModel")
        )
        function = getattr(module, name)

        def stop(*arguments):
            result = function(*arguments)
            os.kill(os.getpid(), signal.SIGSTOP)
            return result

        setattr(module, name, stop)
    trainer.train_or_exit(rank, settings)


def test_program_writes_everything(tmp_path, capfd):
    names = {"checkpoint": "model.pt", "plot": "curves.png", "loss_log": "log.json"}
    paths = {flag: str(tmp_path / name) for flag, name in names.items()}
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["train_lm"])
    with flagsaver.flagsaver(ranks=2, batch=2, steps=2, experts=4, sample=5, **paths):
        train_lm.main(["train_lm"])
    output = capfd.readouterr().out
    assert "unigram entropy" in output and "validation loss" in output and "sample" in output
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "log.json").read_text().splitlines()) == 2
    checkpoint = torch.load(tmp_path / "model.pt")
    assert checkpoint["model"]["blocks.0.moe.experts.w_up"].shape[0] == 4


def test_a_training_that_diverges_stops(tmp_path, capfd):
    paths = {name: str(tmp_path / name) for name in ("checkpoint", "loss_log")}
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["train_lm"])
    size = {"ranks": 2, "batch": 2, "steps": 50, "experts": 4}
    with flagsaver.flagsaver(**size, learning_rate=1e37, **paths), pytest.raises(SystemExit) as end:
        train_lm.main(["train_lm"])
    assert end.value.code == 1
    text = capfd.readouterr().err
    assert text.count("train_lm: the loss of step ") == 1 and "try a smaller" in text
    assert not (tmp_path / "checkpoint").exists()
    records = [json.loads(line) for line in (tmp_path / "loss_log").read_text().splitlines()]
    assert 1 <= len(records) < 50 and all(math.isfinite(record["loss"]) for record in records)
    assert f"the loss of step {len(records)} is nan" in text


def test_progress_reports_in_bundles():
    class Recorder:
        def __init__(self):
            self.steps = []

        def step(self, loss, rate, loads):
            assert rate > 0 and torch.equal(loads, torch.ones(2, 3))
            self.steps.append(loss)

    recorder = Recorder()
    progress = trainer.Progress(recorder, tokens_per_step=10, steps_per_bundle=2)
    for loss in range(3):
        progress.add(torch.tensor(float(loss)), torch.ones(2, 3))
    assert recorder.steps == [0.0, 1.0]
    progress.flush()
    assert recorder.steps == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_validation_takes_every_window_whatever_the_batch(tmp_path, num_ranks):
    losses = []
    for batch in (6, 66):  # a short last batch of 4; one batch larger than the 64 windows
        ranks.launch(validate, num_ranks, batch, str(tmp_path / "loss"))
        losses.append(float((tmp_path / "loss").read_text()))
    model = untrained_model()
    windows = Corpus.from_text(python_help_text()).validation_windows(64, SMALL.context)
    assert len(windows) == 64
    with torch.no_grad():
        expected = float(model(windows).double().mean())
    assert losses == [pytest.approx(expected, rel=1e-6)] * 2


def untrained_model(group=None):
    torch.manual_seed(3)
    return LanguageModel(SMALL, group)


def validate(rank, batch, path):
    model = untrained_model(torch.distributed.group.WORLD)
    loss = validation_loss(model, Corpus.from_text(python_help_text()), batch)
    if rank == 0:
        with open(path, "w", encoding="ascii") as file:
            file.write(repr(loss))


def test_corpus():
    text = python_help_text()
    assert len(text) > 200_000
    corpus = Corpus.from_text(text)
    assert bytes(corpus.train.tolist()) + bytes(corpus.validation.tolist()) == text
    batches = [corpus.batch(torch.Generator().manual_seed(1), 3, 16) for _ in range(2)]
    assert batches[0].shape == (3, 17) and torch.equal(*batches)
    windows = corpus.validation_windows(4, 16)
    assert torch.equal(windows[1:, 0], windows[:-1, -1])
    assert torch.equal(windows[:, :-1].flatten(), corpus.validation[:64].long())


def test_unigram_entropy():
    assert unigram_entropy(b"aaaa") == 0
    assert unigram_entropy(b"abab") == pytest.approx(math.log(2))
    assert 3 < unigram_entropy(python_help_text()) < 3.6


def test_model_is_causal():
    torch.manual_seed(0)
    model = LanguageModel(SMALL)
    tokens = torch.randint(256, (2, 20))
    changed = tokens.clone()
    changed[:, 12:] = 0
    states, changed_states = model.hidden_states(tokens), model.hidden_states(changed)
    assert torch.equal(states[:, :12], changed_states[:, :12])
    assert not torch.equal(states[:, 12], changed_states[:, 12])


def test_learning_rate():
    shares = [learning_rate_share(step, 100) for step in range(100)]
    assert shares[4] == 1 and shares[0] == pytest.approx(0.2)
    assert shares[5:] == sorted(shares[5:], reverse=True) and shares[-1] == pytest.approx(
        0.1, abs=1e-3
    )
    assert learning_rate_share(0, 1) == 1


def test_load_bars():
    assert report.load_bars([0, 1, 2, 1]) == "▁▅█▅"
    assert report.load_bars([0, 0]) == "▁▁"
