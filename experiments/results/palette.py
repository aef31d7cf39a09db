"""How pictures look: colours, marks and dashes that tell lines apart without colour, too."""

from __future__ import annotations

from typing import NamedTuple

COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#B2A200")  # Okabe and Ito 2008
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
STYLES = ("-", "--", ":", "-.")
DPI = 130  # of a picture


class Look(NamedTuple):
    """How a line is drawn, in matplotlib's words."""

    color: str
    marker: str
    style: str


def look(index: int) -> Look:
    """Of the line with this number: a colour and a mark of its own, dashed where the colours come round again.

    >>> look(0), look(8)
    (Look(color='#0072B2', marker='o', style='-'), Look(color='#0072B2', marker='o', style='--'))
    """
    turn, place = divmod(index, len(COLORS))
    return Look(COLORS[place], MARKERS[place], STYLES[turn % len(STYLES)])
