"""Compression that adapts: each bucket by the least exact compressor that is good enough."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...kernels import Residual
from ..algorithms.dense import Dense
from ..builder.build import compressor, with_error_feedback
from ..feedback.error_feedback import ErrorFeedback, Float32Arithmetic
from ..feedback.switch import Switch, released
from ..feedback.worker_momentum import WorkerMomentum
from ..protocol.compressor import Compressor, Traits, inside, traits_of
from ..protocol.layout import Layout, Ranks, working_dtype
from ..protocol.registry import register
from ..protocol.requests import Program, all_reduce
from ..simulate import simulate
from ..state.agreed import MethodChoice, agree_in
from ..state.leaf import Versions
from ..state.tensors import Counter
from ..state.tree import Leaves

logger = logging.getLogger(__name__)
MOST = 16  # methods
NONE = -1.0  # in place of each cosine before there is one


@dataclass
class AdaptiveState:
    """The layout, the steps seen, the choice of the ranks, each method's state with its leaves.

    `told`: the method that was logged last.
    """

    layout: Layout
    step: Counter
    choice: MethodChoice
    methods: tuple[Any, ...]
    leaves: tuple[Leaves, ...]
    told: int = -1


def _traits(compressor: Adaptive) -> Traits:
    return Traits(takes_16_bits=True, choices=len(compressor.methods), extra_rounds_in=agree_in)


@register("adaptive", traits=_traits)
@dataclass(frozen=True)
class Adaptive:
    """One of several compressors for each bucket, by what each loses.

    Li et al. 2020 propose this in section 6.2.3. `ladder`: the compressors, the most exact first, with a "/" between them.
    `target`: the least cosine between what a rank sends and what it meant to send; the last compressor with it is taken.
    In some steps each rank tries all compressors on its gradient and residual, and the ranks average the cosines. So all
    ranks choose alike, and a saved choice holds. With int2 elements whose gradient is zero move: mask averages, not
    gradients.
    """

    ladder: str = "none/int8/int4/int2"
    target: float = 0.85
    methods: tuple[Compressor, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.target <= 1:
            raise ValueError(f"adaptive:target is a cosine, from 0 (anything will do) to 1 (exact), got {self.target}")
        specs = [spec.strip() for spec in self.ladder.split("/")]
        if not 2 <= len(specs) <= MOST or not all(specs):
            raise ValueError(
                f"adaptive:ladder has 2 to {MOST} compressors, the most exact first, as in none/int8/int4; "
                f"got {self.ladder!r}"
            )
        object.__setattr__(self, "methods", tuple(map(_method, specs)))

    def init(self, layout: Layout) -> AdaptiveState:
        """Nothing agreed on: the first step does so."""
        states = tuple(method.init(layout) for method in self.methods)
        numbers = torch.tensor([NONE] * len(states), dtype=torch.float32, device=layout.device)
        choice = MethodChoice(layout, Versions(numbers), None, self.methods, self.target)
        return AdaptiveState(layout, Counter(), choice, states, tuple(map(Leaves, states)))

    def reduce(self, grad: Tensor, state: AdaptiveState, residual: Residual | None = None) -> Program[Tensor]:
        """The average by the method that the ranks chose before this step; in the first step they choose at once."""
        if not grad.numel():
            return grad
        step, choice = state.step.value, state.choice
        state.step.value += 1
        known = choice.known
        now = choice.now if known else 0
        if agree_in(step) or not known:
            yield from self._agree(grad, state, residual)
            now = now if known else choice.now
        _log(state, now, step)
        return (yield from self._by(now, grad, state, residual))

    def _by(self, now: int, grad: Tensor, state: AdaptiveState, residual: Residual | None) -> Program[Tensor]:
        """The average by one method, of all that the others held back too; a method for 16 bits reads them as they are."""
        others, given = [leaves for place, leaves in enumerate(state.leaves) if place != now], grad
        if residual is None and any(leaves.hold_back for leaves in others):
            given = grad.to(working_dtype(grad.dtype))  # 16 bits may not hold what comes out
        residual = released(others, state.layout, given, residual)
        average = yield from Float32Arithmetic(self.methods[now]).reduce(given, state.methods[now], residual)
        return average if given is grad else grad.copy_(average)

    def _agree(self, grad: Tensor, state: AdaptiveState, residual: Residual | None) -> Program[None]:
        """Average each compressor's cosine over the ranks; nothing changes where a gradient is not finite."""
        meant = grad.to(working_dtype(grad.dtype)) if residual is None else residual.before + grad
        agreed = yield from all_reduce(torch.stack([_cosine(method, meant, state.layout) for method in self.methods]))
        before, after = state.choice.update()
        after.copy_(torch.where(agreed.isfinite().all(), agreed, before))
        state.choice.bring(after)


def _method(spec: str) -> Compressor:
    """A method without what belongs around all of them."""
    built = compressor(with_error_feedback(spec))
    built = built.inner if isinstance(built, ErrorFeedback) and built.kept == 1 else built
    built = built.inner if isinstance(built, Float32Arithmetic) else built
    found, parts = traits_of(built), list(inside(built))
    refused = any(isinstance(each, Switch | WorkerMomentum | Adaptive) for each in parts)
    refused = refused or any(isinstance(each, ErrorFeedback) and each.kept < 1 for each in parts)
    if refused or found.needs_all_parameters or found.ranks_per_host is not None:
        raise ValueError(
            f"adaptive:ladder cannot take {spec!r}: give start_iter, error_feedback and momentum to adaptive "
            f"itself, and write hosts+ in front of it"
        )
    return built


def _cosine(method: Compressor, meant: Tensor, layout: Layout) -> Tensor:
    """Return the cosine between `meant` and what one rank alone would send of it by a method."""
    one = meant.new_ones(())
    if isinstance(method, Dense) or meant.is_meta:
        return one
    size = meant.abs().amax()
    scaled = torch.where(size == 0, meant, meant / size)  # squares must not overflow
    alone = dataclasses.replace(layout, ranks=Ranks())
    sent = simulate([method.reduce(scaled.clone(), method.init(alone))])[0]
    lengths = torch.linalg.vector_norm(scaled) * torch.linalg.vector_norm(sent)
    cosine = torch.where(lengths == 0, 0.0, torch.dot(scaled, sent) / lengths)
    return torch.where(size == 0, one, cosine).clamp(0, 1)


def _log(state: AdaptiveState, now: int, step: int) -> None:
    if state.told != now and state.layout.ranks.rank == 0 and not state.choice.flat.is_meta:
        logger.info(
            "%s and others in its bucket: compressor %d of the ladder from step %d on", state.layout.names[0], now, step
        )
    state.told = now
