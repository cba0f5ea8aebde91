"""Installs the wheel into a fresh environment and runs a layer there."""

import os
import pathlib
import sys
import zipfile

from tools.wheel.wheel_environment import WheelEnvironment

PROGRAM = """
import torch
import mok_torch

print(mok_torch.__file__, mok_torch._C.__file__)
torch.manual_seed(0)
layer = mok_torch.MoELayer(64, 48, 8, 2, shared_intermediate_size=32)
x = torch.randn(3, 5, 64, requires_grad=True)
out = layer(x)
out.square().sum().backward()
assert out.shape == x.shape and out.isfinite().all()
assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
print("layer ran")
"""


def test_the_wheel_holds_the_library_and_no_tests():
    wheel = pathlib.Path(os.environ["WHEEL"])
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name.startswith("mok_torch-") and f"-{tag}-{tag}-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    modules = [name for name in names if ".dist-info/" not in name]
    assert all(name.startswith("mok_torch/") for name in modules)
    assert "mok_torch/functional.py" in modules and "mok_torch/layer.py" in modules
    assert sum(name.endswith(".so") for name in modules) == 1
    tests = [name for name in modules if "test_support" in name or name.endswith("_test.py")]
    assert tests == ["mok_torch/self_test.py"], "which `mok_torch check` runs"
    assert "Name: mok-torch" in lines
    assert "Requires-Dist: torch>=2.8" in lines
    assert "Requires-Python: >=3.10" in lines


def test_a_layer_runs_in_a_fresh_environment(tmp_path):
    environment = WheelEnvironment(os.environ["WHEEL"], tmp_path)
    printed = environment.run("-c", PROGRAM)
    assert printed.count(str(environment.site_packages)) == 2, printed
    assert "layer ran" in printed
    assert "mok" in environment.run("-m", "mok_torch", "info").lower()
