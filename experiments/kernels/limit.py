"""Which measurements still fit into the time that all of them may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from .bench import Group


class Limit:
    """Admits groups until `seconds` after its creation are over, or would be by what the same job took before."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.left_out = seconds, list[Group]()
        self._clock, self._began = clock, clock()
        self._per_element: dict[str, float] = {}

    def admit(self, groups: Sequence[Group]) -> Iterator[Group]:
        """Yield the groups that fit; the others are `left_out`. The caller measures each before it asks for the next."""
        for group in groups:
            began = self._clock()
            expected = self._per_element.get(group.case.name, 0.0) * group.elements
            if began + expected - self._began > self.seconds:
                self.left_out.append(group)
                continue
            yield group
            self._per_element[group.case.name] = (self._clock() - began) / group.elements

    def told(self) -> list[str]:
        """Return what was left out, a line for each size and dtype, with the way to measure it."""
        why = f"the limit of {self.seconds:g} s was reached (--all lifts it, --limit N sets it)"
        return [
            f"{why}: {elements:,} elements of {dtype}: {', '.join(each.case.name for each in alike)}"
            for (elements, dtype), alike in groupby(self.left_out, lambda group: (group.elements, group.dtype))
        ]
