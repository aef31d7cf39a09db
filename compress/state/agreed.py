"""Numbers that the ranks have agreed on, the same on all of them: a part of the state, and known to the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..protocol.compressor import Compressor
from ..protocol.layout import Layout
from .gauge import Arriving
from .leaf import Entries, FlatLeaf, Versions
from .tree import parts

EVERY, FIRST, EARLY = 32, 24, (2, 8)  # steps in which a choice is made anew: 2, 8, 24, 56, 88, ...


def agree_in(step: int) -> bool:
    """Return True if the ranks choose again in a step, counted from 0."""
    return step in EARLY or step % EVERY == FIRST


@dataclass
class Agreed(FlatLeaf):
    """A few numbers for a bucket, on its device; a copy is on its way to the host when they are written."""

    layout: Layout
    versions: Versions
    _host: tuple[Tensor, Arriving] | None = None

    @property
    def holds_back(self) -> bool:
        return False

    def numbers(self) -> list[float]:
        """Return all numbers, on the host; the step that wrote them has brought them there."""
        if self._host is None or self._host[0] is not self.flat:
            self._host = self.flat, Arriving(self.flat)
        return self._host[1].read()

    def bring(self, after: Tensor) -> None:
        """Have `after`, where a step has written the numbers anew, on the host by and by."""
        self._host = after, Arriving(after)

    def demand(self, numbers: Tensor) -> float:
        """Rank numbers where several buckets become one: those with the largest demand stay."""
        raise NotImplementedError

    def save(self, field: str) -> Entries:
        return {name: {field: self.flat.clone()} for name in self.layout.names}

    def load(self, field: str, entries: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        found = [entries[name][field] for name in self.layout.names if field in entries.get(name, {})]
        if found:
            self.flat.copy_(max(found, key=self.demand))
            self._host = None
        return {}


@dataclass
class MethodChoice(Agreed):
    """The choice of one of several `methods`, the most exact one first, for a bucket.

    The numbers: for each method the cosine between what it sends and what was meant. `target`: the least cosine wanted.
    `fixed`: a method in place of the chosen one, for plans.
    """

    methods: tuple[Compressor, ...] = ()
    target: float = 0.0
    fixed: int | None = None

    @property
    def last(self) -> int:
        """The least exact method."""
        return len(self.methods) - 1

    @property
    def known(self) -> bool:
        """True if the ranks have agreed on anything."""
        return self.fixed is not None or self.flat.is_meta or self.numbers()[0] >= 0

    @property
    def now(self) -> int:
        """The least exact method that is good enough; the most exact one if none is."""
        if self.fixed is not None:
            return min(self.fixed, self.last)
        if self.flat.is_meta:
            return self.last
        return max((place for place, cosine in enumerate(self.numbers()) if cosine >= self.target), default=0)

    def demand(self, numbers: Tensor) -> float:
        """The least cosines ask for most."""
        return -float(numbers.sum())


def choices(state: Any) -> Iterator[MethodChoice]:
    """Yield the choices in a compressor's state."""
    if isinstance(state, MethodChoice):
        yield state
    for _, part in () if isinstance(state, MethodChoice) else parts(state):
        yield from choices(part)
