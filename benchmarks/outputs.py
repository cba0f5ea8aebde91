"""Flags that name files to write: they are opened before anything is measured."""

import os

from absl import flags

_PLOT_ENDINGS = (".png", ".pdf", ".svg")


def output_path(value: str | None) -> str | None:
    """Relative to where the user is: `bazel run` starts the program somewhere else."""
    return value and os.path.join(os.environ.get("BUILD_WORKING_DIRECTORY", ""), value)


def _check_file(value: str | None) -> bool:
    if value is None:
        return True
    try:
        with open(output_path(value), "ab"):
            pass
    except OSError as error:
        raise flags.ValidationError(f"cannot be written: {error}") from error
    return True


def _check_plot(value: str | None) -> bool:
    if value is not None and not value.endswith(_PLOT_ENDINGS):
        raise flags.ValidationError(f"must end in {', '.join(_PLOT_ENDINGS)}, got {value}")
    return _check_file(value)


def define_json() -> flags.FlagHolder:
    """--json; use its output_path."""
    holder = flags.DEFINE_string("json", None, "Where to write the results.")
    flags.register_validator(holder, _check_file)
    return holder


def define_plot(what: str) -> flags.FlagHolder:
    """--plot; use its output_path."""
    holder = flags.DEFINE_string("plot", None, f"Where to draw {what}.")
    flags.register_validator(holder, _check_plot)
    return holder
