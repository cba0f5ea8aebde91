"""Finds the command; each has its own flags, so only its module is imported."""

from __future__ import annotations

import importlib
import sys

from absl import app, flags

# Command -> what it does. The module mok_torch.cli.<command> has main(argv) -> exit status.
COMMANDS = {
    "info": "versions, this machine, and what the engine can use of it",
    "check": "self-test: the layer and all its gradients against a float64 reference",
}


def usage() -> str:
    """The text that lists the commands."""
    lines = [f"  {name:10}{text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: python -m mok_torch COMMAND [flags]",
            "",
            *lines,
            "",
            "python -m mok_torch COMMAND --help lists the flags of a command.",
        ]
    )


def _parse_flags(arguments: list[str]) -> list[str]:
    """absl's parser, but that to have asked for help is no failure: absl exits with 1."""
    try:
        return flags.FLAGS(arguments)
    except SystemExit:  # of a help flag
        sys.exit(0)
    except flags.Error:
        return app.parse_flags_with_usage(arguments)  # says what is wrong, and exits with 1


def run(argv: list[str]) -> None:
    """Runs the command argv[1] and exits with its status; 2 when there is no such command."""
    command = argv[1] if len(argv) > 1 else ""
    if command in ("-h", "--help", "help"):
        print(usage())
        sys.exit(0)
    if command not in COMMANDS:
        problem = f"unknown command {command!r}" if command else "no command given"
        print(f"{problem}\n\n{usage()}", file=sys.stderr)
        sys.exit(2)
    module = importlib.import_module(f"mok_torch.cli.{command}")
    # What --help prints: absl takes the text and the flags from the main program.
    sys.modules["__main__"].__doc__ = module.__doc__
    for flag in flags.FLAGS.get_key_flags_for_module(module.__name__):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    arguments = [f"python -m mok_torch {command}", *argv[2:]]
    app.run(module.main, argv=arguments, flags_parser=_parse_flags)
