"""Wrong flags are refused before anything starts, in words that tell what to change."""

import dataclasses
import math

import pytest
import torch
from absl import flags
from absl.testing import flagsaver

from examples.train_lm import ranks, train_lm
from examples.train_lm.model import SIZES, ModelConfig


@pytest.fixture(autouse=True)
def parsed_flags():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["train_lm"])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"ranks": 3}, "--ranks=3: a step's 8 sequences .* of 3 ranks. .* --ranks of 1, 2, 4, 8$"),
        ({"batch": 3}, "--batch=3: .* 3 .* of 2 ranks. .* --batch of 2 or a multiple; --ranks of"),
        ({"batch": 3, "ranks": 2}, "--batch=3, --ranks=2: a step's 3 sequences"),
        (
            {"sequences_at_once": 3},
            "--sequences_at_once=3: .* of 2 ranks times 3 at once .*"
            "--batch of 6 or a multiple; --sequences_at_once of 1, 2, 4$",
        ),
        (
            {"size": "medium", "ranks": 3},
            "--ranks=3: .* 32 .* times 8 at once .*; --ranks of 1, 2, 4$",
        ),
    ],
)
def test_batches_that_ranks_cannot_share_are_the_fault_of_a_flag_given(given, text):
    with flagsaver.flagsaver(**given):
        with pytest.raises(flags.IllegalFlagValueError, match="^" + text):
            train_lm.check_batch(None)


def test_batches_name_how_the_number_of_ranks_was_given(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with flagsaver.flagsaver(device="cuda"):
        with pytest.raises(flags.IllegalFlagValueError, match="one rank a GPU, 3 GPUs: "):
            train_lm.check_batch(None)
    monkeypatch.setattr(ranks, "launched_by_torchrun", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "3")
    text = "^--nproc-per-node=3: .* --nproc-per-node of 1, 2, 4, 8$"
    with pytest.raises(flags.IllegalFlagValueError, match=text):
        train_lm.check_batch(None)


def test_cuda_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert train_lm.check_device("cpu")
    for num_ranks, text in ((None, "finds no GPU"), (2, "2 ranks, but 0 GPUs")):
        with flagsaver.flagsaver(device="cuda", ranks=num_ranks):
            with pytest.raises(flags.ValidationError, match=text):
                train_lm.check_device("cuda")
    with flagsaver.flagsaver(device="cuda"):
        assert train_lm.check_batch(None)  # leaves the message to check_device


def test_sizes():
    assert train_lm.model_config() == ModelConfig() and train_lm.batch_of_step() == 8
    with flagsaver.flagsaver(device="cuda", experts=64):
        config = train_lm.model_config()
        assert config == dataclasses.replace(SIZES["medium"], experts=64)
        assert config.dense_precision == "bf16" and train_lm.batch_of_step() == 32
    with flagsaver.flagsaver(size="medium"):
        assert train_lm.batch_of_step() == 32 and train_lm.check_batch(None)


@pytest.mark.parametrize("rate", [math.nan, math.inf, 0.0, -1.0])
def test_learning_rate_must_be_positive(rate):
    with pytest.raises(flags.ValidationError, match=f"must be finite and > 0, got {rate}"):
        train_lm.check_learning_rate(rate)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 1e30])
def test_timeouts_must_be_numbers_of_seconds(seconds):
    with pytest.raises(flags.ValidationError, match="timeout_seconds: expected a"):
        train_lm.check_timeout(seconds)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/nowhere/model.pt", "there is no folder /nowhere"),
        ("/", "must be a file, but / is a folder"),
        ("", "must name a file"),
        # A folder that not even root may write to.
        ("/proc/self/model.pt", "/proc/self is not writable"),
    ],
)
def test_output_files_must_be_writable(path, text):
    with pytest.raises(flags.ValidationError, match=text):
        train_lm.check_output(path)


def test_plots_are_pictures():
    assert train_lm.check_plot(None) and train_lm.check_plot("/tmp/curves.svg")
    with pytest.raises(flags.ValidationError, match=r"must end in .png, .pdf, .svg, got a.xyz"):
        train_lm.check_plot("a.xyz")


def test_outputs_have_to_be_different_files():
    assert train_lm.check_outputs({"checkpoint": "a", "plot": "b", "loss_log": None})
    text = "--checkpoint and --loss_log must name different files, not both .*/a$"
    with pytest.raises(flags.IllegalFlagValueError, match=text):
        train_lm.check_outputs({"checkpoint": "a", "plot": "b", "loss_log": "./a"})


def test_fewer_experts_than_a_token_visits_are_a_flag_error():
    with pytest.raises(flags.IllegalFlagValueError, match="experts"):
        with flagsaver.flagsaver(experts=1):
            pass
    with flagsaver.flagsaver(size="medium", experts=3):
        with pytest.raises(flags.ValidationError, match="must be at least the 4 that a token"):
            train_lm.check_experts(3)
