"""Runs `python -m mok_torch COMMAND [flags]`."""

import sys

from mok_torch.cli.main import run

if __name__ == "__main__":
    run(sys.argv)
