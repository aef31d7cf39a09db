"""Whole numbers as users give them."""

from __future__ import annotations

from numbers import Integral


def whole_number(value: object, expected: str, *, least: int = 1, most: float = float("inf")) -> int:
    """`value` as an int, also if it is NumPy's. Raises ValueError, saying what was `expected`, where it is none in range.

    >>> whole_number(64, "every is a number of steps, at least 1")
    64
    """
    if not isinstance(value, Integral) or not least <= int(value) <= most:
        raise ValueError(f"{expected}; got {value!r}")
    return int(value)
