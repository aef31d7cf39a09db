"""Rows of any command: column name to value, nested names joined by dots, and how values are shown and read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Row = dict[str, Any]
WRAPPER = "measurements."  # dropped from the names of columns
UNITS = {"k": 10**3, "M": 10**6, "G": 10**9}


def flat(entry: Mapping[str, Any]) -> Row:
    """Nested mappings as one, names joined by dots; lists stay.

    >>> flat({"measurements": {"sec_per_iter": {"p50": 0.5}}, "loss": [1.0]})
    {'sec_per_iter.p50': 0.5, 'loss': [1.0]}
    """
    found = dict(_flattened(entry, ""))
    return {name.removeprefix(WRAPPER): value for name, value in found.items()}


def _flattened(entry: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in entry.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def shown(value: Any) -> str:
    """A value as text, numbers to four digits.

    >>> shown(0.123456), shown(60000000), shown(None), shown("none")
    ('0.1235', '60,000,000', '', 'none')
    """
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 10000 else f"{value:.4g}"


def milliseconds(seconds: float) -> str:
    """Seconds as text in milliseconds, to three digits.

    >>> milliseconds(0.0123), milliseconds(0.00012)
    ('12.3 ms', '0.12 ms')
    """
    value = seconds * 1000
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def elements_of(text: str, least: int = 1) -> int:
    """A number of elements from its text, in powers of ten. Raises ValueError for less than `least`.

    >>> elements_of("6.5536M"), elements_of("100")
    (6553600, 100)
    """
    unit = UNITS.get(text[-1:], 1)
    try:
        count = round(float(text[:-1] if unit > 1 else text) * unit)
    except (ValueError, OverflowError):
        raise ValueError(f"sizes are numbers of elements such as 100, 10k or 1M, got {text!r}") from None
    if count < least:
        raise ValueError(f"sizes are at least {least} element{'s' * (least > 1)}, got {text}")
    return count
