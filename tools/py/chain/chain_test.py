"""Tests that targets see the locked environment and extension modules."""

import importlib.metadata
import os
import pathlib

import torch

from tools.py.chain import _sum


def _direct_requirements():
    """(name, version) of the locked packages that apply to every CPython."""
    lines = pathlib.Path("third_party/python/requirements.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#") and ";" not in line]
    return [pin.split("==") for pin in pins]


def test_extension_module_takes_torch_values():
    assert _sum.sum(torch.tensor([1.0, 2.0, 3.5]).tolist()) == 6.5


def test_locked_packages_are_importable():
    locked = os.environ["PYTHON_ENV_IS_LOCKED"] == "1"
    for name, version in _direct_requirements():
        installed = importlib.metadata.version(name).split("+")[0]
        # An environment of the user's own may hold other versions.
        assert installed == version or not locked, name


def test_shards_are_honoured():
    assert os.environ["TEST_TOTAL_SHARDS"] == "2"


def test_temporary_folder_is_private(tmp_path):
    assert str(tmp_path).startswith(os.environ["TEST_TMPDIR"])
