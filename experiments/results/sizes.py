"""Numbers of elements as users write them."""

from __future__ import annotations

UNITS = {"k": 10**3, "M": 10**6, "G": 10**9}


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
