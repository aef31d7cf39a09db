"""Another compressor from a given step on, such as after a warm-up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...kernels import Residual
from ..protocol.compressor import Compressor, Traits, children, own_traits, with_traits
from ..protocol.layout import Layout
from ..protocol.requests import Program
from ..state.tensors import Counter
from ..state.tree import Leaves


@dataclass
class SwitchState:
    """The layout, the synchronized steps so far, and every stage's state with its leaves."""

    layout: Layout
    step: Counter
    stages: tuple[Any, ...]
    leaves: tuple[Leaves, ...]


@with_traits(lambda each: Traits(residual_first=all(own_traits(stage).residual_first for stage in each.stages)))
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


def warm_up_steps(compressor: Compressor) -> int:
    """Synced steps until the last stage of every switch inside a compressor has begun.

    >>> from gradwire.compress import Dense
    >>> warm_up_steps(Switch({0: Dense(), 1000: Dense()}))
    1000
    """
    own = max(compressor.starts) if isinstance(compressor, Switch) else 0
    return max([own, *map(warm_up_steps, children(compressor))])
