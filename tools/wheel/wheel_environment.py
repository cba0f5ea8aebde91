"""Installs a wheel into a fresh virtual environment, offline, as a user would with pip.

    environment = WheelEnvironment(os.environ["WHEEL"], tmp_path)
    print(environment.run("-c", "import mok_torch; print(mok_torch.__file__)"))

The environment sees the packages of the one that runs the test (torch is not copied), but nothing
of the source tree. pip resolves the wheel's Requires-Dist against those packages, without an index:
a requirement that the test environment does not meet makes the installation fail.
"""

import os
import pathlib
import subprocess
import sys
import sysconfig


class WheelEnvironment:
    """A virtual environment below `folder` with `wheel` installed."""

    def __init__(self, wheel, folder):
        self.folder = pathlib.Path(folder) / "wheel_environment"
        self.python = self.folder / "bin" / "python3"
        # The outer environment's pip does the work: a second one would bring an older setuptools.
        self._call(sys.executable, "-m", "venv", "--without-pip", str(self.folder))
        self.site_packages = next(self.folder.glob("lib/python3*/site-packages"))
        outer = sysconfig.get_paths()["purelib"]
        (self.site_packages / "outer_environment.pth").write_text(outer + "\n")
        wheel = str(pathlib.Path(wheel).absolute())
        self.run("-m", "pip", "install", "--quiet", "--no-index", wheel)

    def run(self, *arguments, **environment):
        """Runs the environment's Python in its own folder and returns what it printed."""
        return self._call(str(self.python), *arguments, **environment)

    def _call(self, *command, **environment):
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PIP_", "PYTHON"))
        }
        parent = self.folder.parent
        result = subprocess.run(
            command,
            cwd=parent,
            # pip wants a home folder that it can write to; the sandbox has none.
            env={**clean, "HOME": str(parent), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            line = " ".join(command)
            raise RuntimeError(f"{line}\nexit status {result.returncode}\n{result.stderr}")
        return result.stdout
