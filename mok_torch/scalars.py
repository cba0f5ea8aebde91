"""Numbers, flags and choices as arguments: NumPy's numbers are as good as Python's."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Container
from typing import Any

MAX_SIZE = 2**31 - 1  # of any dimension or count
_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
_MIN_FLOAT32 = 2.0**-126  # the least that keeps all its digits


def as_integer(
    name: str, value: Any, lowest: int, highest: int | None = None, *, optional: bool = False
) -> int | None:
    """The value as an int of that range, of whatever integer type but bool; None if optional.

    Raises:
      TypeError: it is no integer. ValueError: it is out of range.
    """
    if optional and value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        expected = "an int or None" if optional else "an int"
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}: {value!r}")
    number = operator.index(value)
    if highest is None and number < lowest:
        raise ValueError(f"{name}: expected at least {lowest}, got {number}")
    if highest is not None and not lowest <= number <= highest:
        raise ValueError(f"{name}: expected {lowest} to {highest}, got {number}")
    return number


def as_number(
    name: str, value: Any, lowest: float = -_MAX_FLOAT32, *, optional: bool = False
) -> float | None:
    """The value as a float, of whatever real type but bool; None if optional.

    Raises:
      TypeError: it is no number. ValueError: it is lower, a NaN, an infinity, or larger than any
        float32.
    """
    if optional and value is None:
        return None
    expected = "number or None" if optional else "number"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a {expected}, got {type(value).__name__}: {value!r}")
    if not -_MAX_FLOAT32 <= value <= _MAX_FLOAT32:  # a NaN is not
        raise ValueError(f"{name}: expected a finite number (of float32), got {value}")
    if value < lowest:
        raise ValueError(f"{name}: expected at least {lowest:g}, got {value}")
    return float(value)


def as_positive_number(name: str, value: Any, *, optional: bool = False) -> float | None:
    """As as_number; ValueError also for what is not > 0, to float32."""
    number = as_number(name, value, optional=optional)
    if number is not None and number < _MIN_FLOAT32:
        raise ValueError(f"{name}: expected a number > 0 (of float32), got {value}")
    return number


def as_flag(name: str, value: Any, *, optional: bool = False) -> bool | None:
    """The value, if it is a bool; None if optional. TypeError: it is something else."""
    if isinstance(value, bool) or (optional and value is None):
        return value
    expected = "a bool or None" if optional else "a bool"
    raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}: {value!r}")


def as_choice(name: str, value: Any, choices: Container[str], *, optional: bool = False):
    """The value, if it is one of the names; None if optional.

    Raises:
      TypeError: it is no str. ValueError: it is another one.
    """
    if optional and value is None:
        return None
    expected = "None or one of" if optional else "one of"
    text = f"{name}: expected {expected} {tuple(choices)}, got"
    if not isinstance(value, str):
        raise TypeError(f"{text} {type(value).__name__}: {value!r}")
    if value not in choices:
        raise ValueError(f"{text} {value!r}")
    return value
