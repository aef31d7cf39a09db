"""Compressors that contain compressors: error feedback, wide arithmetic, stages, groups of parameters."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..kernels import Residual
from .dense import Dense
from .gauge import Gauge
from .leaves import Counter, PerParameter
from .pieces import Place, joined, pieces, put_back
from .protocol import Compressor, Layout, Program, children, working_dtype
from .state import Leaves
from .together import together


@dataclass
class ErrorFeedbackState:
    """What this rank held back, the inner compressor's state, and how it fares."""

    residual: PerParameter
    inner: Any
    gauge: Gauge


@dataclass(frozen=True)
class ErrorFeedback:
    """What compression loses is added to the next gradient (Seide et al. 2014; Karimireddy et al. 2019, algorithm 2)."""

    inner: Compressor

    def init(self, layout: Layout) -> ErrorFeedbackState:
        """A zero residual, float32 or wider."""
        residual = PerParameter.zeros(layout.widened(), residual=True)
        return ErrorFeedbackState(residual, self.inner.init(layout), Gauge())

    def reduce(self, grad: Tensor, state: ErrorFeedbackState, residual: Residual | None = None) -> Program[Tensor]:
        """The inner average of `grad` plus what was held back; an outer residual moves into this one."""
        held = state.residual.update()
        if residual is not None:
            torch.add(held.before, residual.before, out=held.after)
            residual.after.zero_()
            held = state.residual.update()
        state.gauge.begin(grad, held)
        average = yield from self.inner.reduce(grad, state.inner, held)
        state.gauge.end(held)
        return average


@dataclass(frozen=True)
class Widen:
    """Arithmetic in float32 for 16-bit gradients; what the 16-bit result cannot hold goes to the residual.

    An inner compressor with `takes_16_bits` does so by itself; others are given a copy in float32.
    """

    inner: Compressor

    def init(self, layout: Layout) -> Any:
        """The inner state, for the wide layout."""
        return self.inner.init(layout.widened())

    def reduce(self, grad: Tensor, state: Any, residual: Residual | None = None) -> Program[Tensor]:
        """The inner average, taken in float32 or wider."""
        if grad.dtype == working_dtype(grad.dtype) or _takes_16_bits(self.inner, state, residual):
            return (yield from self.inner.reduce(grad, state, residual))
        wide = yield from self.inner.reduce(grad.to(working_dtype(grad.dtype)), state, residual)
        kernels.cast_scaled(wide, grad, 1.0, None if residual is None else residual.after)
        return grad


def _takes_16_bits(compressor: Compressor, state: Any, residual: Residual | None) -> bool:
    """Whether the next step of a compressor reads 16 bits, computes in float32 and rounds the average once."""
    if isinstance(compressor, Switch):
        now = compressor.stage(state)
        released = residual is None and any(leaves.hold_back for leaves in state.leaves[:now])  # into the gradient
        return not released and _takes_16_bits(compressor.stages[now], state.stages[now], residual)
    return getattr(compressor, "takes_16_bits", False)


@dataclass
class SwitchState:
    """Where the parameters lie, synced steps so far, and every stage's state with its leaves."""

    layout: Layout
    step: Counter
    stages: tuple[Any, ...]
    leaves: tuple[Leaves, ...]


@dataclass(frozen=True, init=False)
class Switch:
    """Another compressor from a given synced step on: `Switch({0: Dense(), 1000: PowerSGD(4)})` is a warm-up."""

    starts: tuple[int, ...]
    stages: tuple[Compressor, ...]

    def __init__(self, stages: Mapping[int, Compressor]) -> None:
        if not stages or min(stages) != 0:
            raise ValueError(f"the stages of a switch start at step 0, then at later steps; got steps {sorted(stages)}")
        object.__setattr__(self, "starts", tuple(sorted(stages)))
        object.__setattr__(self, "stages", tuple(stages[start] for start in sorted(stages)))

    def init(self, layout: Layout) -> SwitchState:
        """All stages' states, at step 0."""
        stages = tuple(stage.init(layout) for stage in self.stages)
        return SwitchState(layout, Counter(), stages, tuple(map(Leaves, stages)))

    def stage(self, state: SwitchState) -> int:
        """The number of the stage that the next step falls in."""
        return max(index for index, start in enumerate(self.starts) if start <= state.step.value)

    def reduce(self, grad: Tensor, state: SwitchState, residual: Residual | None = None) -> Program[Tensor]:
        """The average by the stage that this step falls in, of all that stages before it held back too."""
        now = self.stage(state)
        state.step.value += 1
        residual = released(state.leaves[:now], state.layout, grad, residual)
        return (yield from self.stages[now].reduce(grad, state.stages[now], residual))


def released(leaves: Iterable[Leaves], layout: Layout, grad: Tensor, residual: Residual | None) -> Residual | None:
    """The residual with what other states hold back, which then is in no other place; without one it goes into `grad`."""
    owing = [each for each in leaves if each.hold_back]  # once more after a step that was undone
    if owing and residual is not None:
        held = residual.in_place()
        residual = Residual(held, held)
    for each in owing:
        each.release(layout, grad if residual is None else residual.after)
    return residual


@dataclass
class PartitionState:
    """For each group of parameters: the places of its members in the bucket, and its state."""

    places: tuple[tuple[Place, ...], ...]
    states: tuple[Any, ...]


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
    inner: Compressor, state: Any, places: tuple[Place, ...], grad: Tensor, residual: Residual | None
) -> Program[None]:
    """Reduce scattered parts as one flat gradient, and put the average and the residual back in their places."""
    parts = pieces(grad, places)
    held = None if residual is None else torch.cat(pieces(residual.before, places))
    average = yield from inner.reduce(torch.cat(parts), state, None if held is None else Residual(held, held))
    put_back(average, parts)
    if held is not None and residual is not None:
        put_back(held, pieces(residual.after, places))


def warm_up_steps(compressor: Compressor) -> int:
    """Synced steps until the last stage of every switch inside a compressor has begun.

    >>> warm_up_steps(ErrorFeedback(Switch({0: Dense(), 1000: Dense()})))
    1000
    """
    own = max(compressor.starts) if isinstance(compressor, Switch) else 0
    return max([own, *map(warm_up_steps, children(compressor))])
