"""The look of pictures: colours, and marks and dashes that separate lines without colour, too."""

from __future__ import annotations

from typing import NamedTuple

COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#B2A200")  # Okabe and Ito 2008
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
STYLES = ("-", "--", ":", "-.")
DPI = 130  # of a picture


class Look(NamedTuple):
    """The look of a line, in matplotlib's words."""

    color: str
    marker: str
    style: str


def look(index: int) -> Look:
    """Return the look of the line with this number: a colour and a mark of its own, dashed if colours repeat.

    >>> look(0), look(8)
    (Look(color='#0072B2', marker='o', style='-'), Look(color='#0072B2', marker='o', style='--'))
    """
    turn, place = divmod(index, len(COLORS))
    return Look(COLORS[place], MARKERS[place], STYLES[turn % len(STYLES)])
