"""Numbers as arguments: NumPy's are as good as Python's, and a bool is none."""

from __future__ import annotations

import numbers
import operator
from typing import Any


def as_integer(
    name: str, value: Any, lowest: int, highest: int | None = None, *, optional: bool = False
) -> int | None:
    """The value as an int of that range, of whatever integer type; None if optional.

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


def as_number(name: str, value: Any, *, optional: bool = False) -> float | None:
    """The value as a float, of whatever real type; None if optional. TypeError: it is none."""
    if optional and value is None:
        return None
    expected = "number or None" if optional else "number"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a {expected}, got {type(value).__name__}: {value!r}")
    return float(value)
