"""The numbers that codes of quantized payloads stand for."""

from __future__ import annotations

from typing import NamedTuple

HALVES = -1  # in place of an exponent's bits: codes stand for whole numbers and a half, so that none is zero


class Format(NamedTuple):
    """The numbers that codes stand for, in scales of their block, up to `limit`. The block's largest magnitude is `steps`.

    `least`: of floats, the exponent of the smallest power of two that has a mantissa. `offset`: what code 0 stands for.
    """

    limit: float
    steps: float
    least: int = 0
    offset: float = 0.0


FORMATS = {  # by bits, and those of the exponent
    (8, 0): Format(127, 127.0),
    (4, 0): Format(7, 8.0),  # fewer steps than there are codes, or more: what loses least where tails are heavy
    (2, 0): Format(1, 2.25),
    (2, HALVES): Format(1.5, 2.0, offset=0.5),  # nothing is off by more than half a scale
    (8, 4): Format(448, 448.0, least=-6),  # e4m3 and e5m2 of the OCP, without their infinities
    (8, 5): Format(57344, 57344.0, least=-14),
    (8, 7): Format(1, 1.0, least=-126),  # powers of two
}
