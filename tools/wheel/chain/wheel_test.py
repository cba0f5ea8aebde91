"""Installs a wheel with an extension module into a fresh environment and uses it."""

import os
import pathlib
import subprocess
import sys

from tools.wheel.wheel_environment import WheelEnvironment


def test_name_states_this_python():
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    name = pathlib.Path(os.environ["WHEEL"]).name
    assert name.startswith(f"mok_wheel_chain-{os.environ['MOK_VERSION']}-{tag}-{tag}-linux_")


def test_version_is_the_module_version():
    assert f'version = "{os.environ["MOK_VERSION"]}"' in pathlib.Path("MODULE.bazel").read_text()


def test_installed_package_works(tmp_path):
    environment = WheelEnvironment(os.environ["WHEEL"], tmp_path)
    program = "import tools.wheel.chain as c; print(c.__file__, c._version.__file__); c.main()"
    printed = environment.run("-c", program)
    assert printed.count(str(environment.site_packages)) == 2
    assert f"built for {sys.version_info.major}.{sys.version_info.minor}\n" in printed
    script = environment.folder / "bin" / "mok-wheel-chain"
    assert subprocess.check_output([str(script)], text=True).startswith("built for 3.")
