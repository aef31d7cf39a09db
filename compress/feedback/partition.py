"""A compressor by parameter."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels import Residual
from ..algorithms.dense import Dense
from ..algorithms.powersgd import joined, put_back
from ..protocol.compressor import Compressor, Traits, with_traits
from ..protocol.layout import Layout
from ..protocol.requests import Program, together


@dataclass
class PartitionState:
    """For each group of parameters: the places of its members in the bucket, and its state."""

    places: tuple[tuple[slice, ...], ...]
    states: tuple[Any, ...]


@with_traits(Traits(by_name=True))
@dataclass(frozen=True)
class Partition:
    """A compressor by parameter: the first rule whose pattern matches the name decides (`*.bias`, `embedding.*`).

    Groups share their rounds: what is alike travels in one collective.
    """

    rules: tuple[tuple[str, Compressor], ...]
    otherwise: Compressor = Dense()

    def init(self, layout: Layout) -> PartitionState:
        """The groups that have members, each with a state of its own."""
        members: list[list[int]] = [[] for _ in self._compressors()]
        for index, name in enumerate(layout.names):
            members[self.group(name)].append(index)
        places = tuple(joined((layout.offsets[i], layout.sizes[i]) for i in inside) for inside in members)
        states = tuple(
            compressor.init(layout.select(inside)) if inside else None
            for compressor, inside in zip(self._compressors(), members, strict=True)
        )
        return PartitionState(places, states)

    def group(self, name: str) -> int:
        """The index of the rule for a parameter; the number of rules stands for `otherwise`."""
        matches = (index for index, (pattern, _) in enumerate(self.rules) if fnmatch.fnmatchcase(name, pattern))
        return next(matches, len(self.rules))

    def _compressors(self) -> tuple[Compressor, ...]:
        return (*(compressor for _, compressor in self.rules), self.otherwise)

    def reduce(self, grad: Tensor, state: PartitionState, residual: Residual | None = None) -> Program[Tensor]:
        """Each group's average by its own compressor."""
        groups = zip(self._compressors(), state.states, state.places, strict=True)
        yield from together(*(_grouped(*group, grad, residual) for group in groups if group[2]))
        return grad


def _grouped(
    inner: Compressor, state: Any, places: tuple[slice, ...], grad: Tensor, residual: Residual | None
) -> Program[None]:
    """Reduce scattered parts as one flat gradient, and put the average and the residual back in their places."""
    parts = [grad[place] for place in places]
    held = None if residual is None else torch.cat([residual.before[place] for place in places])
    average = yield from inner.reduce(torch.cat(parts), state, None if held is None else Residual(held, held))
    put_back(average, parts)
    if held is not None and residual is not None:
        put_back(held, [residual.after[place] for place in places])
