"""A training step as a planner sees it: when each piece of the gradients is ready, what it costs, when it is needed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Piece:
    """A piece that travels as one: a bucket or a slice of one.

    `ready`: seconds from the beginning of backward until its last gradient is there. `wire`: seconds that it holds the
    link. `needed`: seconds from the beginning of the next forward until that wants it, if it never waits. Raises
    ValueError for what is no time.
    """

    ready: float
    wire: float
    needed: float

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if not 0 <= seconds < math.inf:
                raise ValueError(f"{name} of a piece is a number of seconds, at least 0; got {seconds!r}")


@dataclass(frozen=True)
class StepModel:
    """The computation of a step, and the pieces that it communicates over one link.

    `forward`, `backward`: seconds of computation. A step lasts from the beginning of a backward to that of the next. Raises
    ValueError for a piece that is ready after backward or needed after forward.
    """

    forward: float
    backward: float
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        for index, piece in enumerate(self.pieces):
            if piece.ready > self.backward + _ROUNDING or piece.needed > self.forward + _ROUNDING:
                raise ValueError(
                    f"piece {index} is ready within backward ({self.backward} s) and needed within forward "
                    f"({self.forward} s); got {piece}"
                )

    @property
    def computation(self) -> float:
        """Seconds of a step that never waits."""
        return self.forward + self.backward


_ROUNDING = 1e-9  # seconds: sums of layers in one order and in the other


def layered(layers: Iterable[tuple[float, float, float]]) -> StepModel:
    """A piece a layer: (forward seconds, backward seconds, wire seconds) of each, in the order of forward.

    >>> layered([(1, 2, 5), (1, 2, 0)]).pieces[0]
    Piece(ready=4, wire=5, needed=0)
    """
    rows = list(layers)
    needed = accumulate((forward for forward, _, _ in rows), initial=0)
    ready = list(accumulate(backward for _, backward, _ in reversed(rows)))[::-1]
    pieces = (Piece(at, wire, by) for at, by, (_, _, wire) in zip(ready, needed, rows, strict=False))
    return StepModel(sum(row[0] for row in rows), sum(row[1] for row in rows), tuple(pieces))


def merged(pieces: Sequence[Piece], wire: float) -> Piece:
    """A bucket of several pieces, sent once all are ready and needed where the first of them is.

    >>> merged([Piece(1, 2, 3), Piece(2, 2, 1)], wire=3.5)
    Piece(ready=2, wire=3.5, needed=1)
    """
    return Piece(max(piece.ready for piece in pieces), wire, min(piece.needed for piece in pieces))
