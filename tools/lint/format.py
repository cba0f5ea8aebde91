"""Formats the source tree in place: ./bazelw run //tools/lint:format"""

import os
import pathlib
import subprocess
import sys

from tools.lint import source_tree


def main():
    root = pathlib.Path(os.environ["BUILD_WORKSPACE_DIRECTORY"])
    programs = pathlib.Path(sys.executable).parent
    # Files given on the command line (from the workspace root), else all.
    paths = sys.argv[1:] or list(source_tree.source_files(root))
    commands = {
        "clang-format": [["-i", "--style=file"], source_tree.is_cpp],
        "ruff": [["format", "--no-cache"], source_tree.is_python],
    }
    for program, (arguments, is_kind) in commands.items():
        files = [path for path in paths if is_kind(path)]
        if files:
            subprocess.run([programs / program, *arguments, *files], cwd=root, check=True)


if __name__ == "__main__":
    main()
