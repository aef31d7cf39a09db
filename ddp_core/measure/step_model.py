"""A training step as a planner sees it: when each piece is ready and needed, and what a collective costs by its size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy


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


MOST = 256  # collectives that a fit looks at: it compares each two


@dataclass(frozen=True)
class LinkCost:
    """alpha + beta * bytes (as MG-WFBP has it, Shi et al. 2019): `alpha` seconds a collective, `beta` seconds a byte that a
    rank sends.
    """

    alpha: float
    beta: float

    def seconds(self, sent_bytes: float, rounds: float = 1) -> float:
        """Return the seconds of `rounds` collectives that send `sent_bytes` together.

        Args:
            sent_bytes: bytes that a rank sends.
            rounds: the number of collectives.

        Returns:
            Seconds.

        >>> LinkCost(alpha=0.5, beta=0.25).seconds(8)
        2.5
        """
        return self.alpha * rounds + self.beta * sent_bytes

    @classmethod
    def fitted(cls, samples: Iterable[tuple[float, float]]) -> LinkCost:
        """From (bytes sent, seconds): beta is the median slope between two of them, weighed by their distance in bytes,
        alpha the median of what is left; both at least 0.

        So a few collectives that took long for reasons of their own do not count (Sen 1968; weights after Jaeckel 1972). Of
        sizes that are all alike alpha cannot be told, and is 0. Of many samples `MOST` are taken, evenly spaced by size.
        Raises ValueError without a sample that sent something.
        """
        found = sorted((sent, seconds) for sent, seconds in samples if sent > 0)
        if not found:
            raise ValueError("a link's cost is fitted to collectives that sent something, and there are none")
        chosen = [found[place * len(found) // MOST] for place in range(MOST)] if len(found) > MOST else found
        sent, seconds = numpy.array(chosen).T
        one, other = numpy.triu_indices(len(chosen), 1)
        apart = sent[other] > sent[one]
        one, other = one[apart], other[apart]
        if not len(one):
            return cls(0.0, float(numpy.median(seconds / sent)))
        distances = sent[other] - sent[one]
        beta = max(0.0, _weighted_median((seconds[other] - seconds[one]) / distances, distances))
        return cls(max(0.0, float(numpy.median(seconds - beta * sent))), beta)


def _weighted_median(values: Any, weights: Any) -> float:
    """Half of the weight lies on either side. Both are arrays."""
    order = numpy.argsort(values)
    reached = numpy.cumsum(weights[order])
    return float(values[order[numpy.searchsorted(reached, reached[-1] / 2)]])


def link_samples(replied: Iterable[tuple[float, float, str, float]]) -> Iterator[tuple[float, float]]:
    """(bytes sent, seconds that the link was held) of each request: a reply has waited for those that came before it.

    `replied`: as `replies` tells it.
    """
    free = -math.inf
    for end, begin, sent in sorted((end, begin, sent) for begin, end, _, sent in replied):
        yield sent, max(0.0, end - max(begin, free))
        free = end
