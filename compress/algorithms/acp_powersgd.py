"""PowerSGD with one factor a step, P and Q in turn (Zhang et al. 2023, ACP-SGD)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import kernels
from ...kernels import Factors, Matrix, Residual
from ..protocol.compressor import Traits
from ..protocol.layout import Layout
from ..protocol.registry import register
from ..protocol.requests import Program
from ..state.tensors import Counter, PerParameter
from .powersgd import PowerSGD, draw_normal, finish, means, put_whole, taken_whole, zeros_kept
from .zero_rows import ZeroRows


@dataclass
class ACPPowerSGDState:
    """The low-rank parameters, as they lie and transposed, and those sent whole; the last P and Q (transposed);
    the steps seen; the rows of the bucket.
    """

    factors: Factors
    transposed: Factors
    whole: tuple[slice, ...]
    p: PerParameter
    q: PerParameter
    step: Counter
    of_bucket: ZeroRows


def sends_q(step: int) -> bool:
    """Return True if a step sends Q: the ranks then agree on the rows that are zero on all of them, in a further round."""
    return step % 2 == 1


def _traits(compressor: ACPPowerSGD) -> Traits:
    varies = compressor.rank > kernels.native.LARGEST_RANK
    return Traits(takes_16_bits=True, varies_with_threads=varies, forgets_what_it_sends=True, extra_rounds_in=sends_q)


@register("acp-powersgd", traits=_traits)
@dataclass(frozen=True)
class ACPPowerSGD:
    """PowerSGD that sends P in one step and Q in the next: one all-reduce and half the bytes a step.

    Zhang et al. 2023, ACP-SGD. A step projects each matrix M onto the factor of the step before, made orthonormal: M Q Qᵀ,
    then P Pᵀ M. As the projection is linear, each rank holds back exactly what its own matrix lacks. `rank`,
    `min_compression_rate`, `seed`: as in PowerSGD. Elements of a matrix whose gradient is zero move, unless its row is zero:
    mask averages, not gradients.
    """

    rank: int = 4
    min_compression_rate: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"acp-powersgd:rank is at least 1, got {self.rank}")
        if not self.min_compression_rate >= 0:
            raise ValueError(f"acp-powersgd:min_compression_rate is at least 0, got {self.min_compression_rate}")

    def init(self, layout: Layout) -> ACPPowerSGDState:
        """Random factors for each matrix worth compressing: any step may be the first."""
        begun = PowerSGD(self.rank, self.min_compression_rate, seed=self.seed).init(layout)
        matrices = begun.factors.matrices
        shapes = tuple((m.rank, m.rows) for m in matrices)
        p = PerParameter.zeros(dataclasses.replace(begun.q.layout, shapes=shapes), optional=True)
        draw_normal(p.layout, p.flat, self.seed, step=1)
        transposed = Factors(tuple(Matrix(m.offset, m.columns, m.rows, m.rank) for m in matrices))
        return ACPPowerSGDState(
            begun.factors, transposed, begun.whole, p, begun.q, begun.step, ZeroRows.of_layout(layout)
        )

    def reduce(self, grad: Tensor, state: ACPPowerSGDState, residual: Residual | None = None) -> Program[Tensor]:
        """The average of this step's factor, as matrices; what does not compress rides along."""
        now_q = sends_q(state.step.value) and bool(state.factors.matrices)
        state.step.value += 1
        if not now_q:
            return (yield from _average_p(grad, state, residual))
        return (yield from zeros_kept(_average_q(grad, state, residual), grad, state, residual))


def _average_p(grad: Tensor, state: ACPPowerSGDState, residual: Residual | None) -> Program[Tensor]:
    q = state.q.flat.clone()
    kernels.orthogonalize(q, state.transposed)
    p = torch.empty_like(state.p.flat)
    kernels.low_rank_left(grad, residual, state.factors, q, p)
    mean = yield from _mean(p.clone(), grad, state, residual)
    finish(grad, None if residual is None else residual.after, state.factors, (mean, q), (p, q))
    _remember(state.p, state.transposed, mean)
    return grad


def _average_q(grad: Tensor, state: ACPPowerSGDState, residual: Residual | None) -> Program[Tensor]:
    p = state.p.flat.clone()
    kernels.orthogonalize(p, state.factors)
    q = torch.empty_like(state.q.flat)
    kernels.low_rank_right(_given(grad, residual, state.factors), state.factors, p, q)
    mean = yield from _mean(q.clone(), grad, state, residual)
    finish(grad, None if residual is None else residual.after, state.factors, (p, mean), (p, q))
    _remember(state.q, state.factors, mean)
    return grad


def _mean(factor: Tensor, grad: Tensor, state: ACPPowerSGDState, residual: Residual | None) -> Program[Tensor]:
    """The mean of a factor; what is sent whole rides along, and is put back."""
    (mean, _), (whole, _) = yield from means(factor, taken_whole(grad, state.whole, residual, factor.dtype))
    put_whole(whole, None, grad, state.whole, residual)
    return mean


def _given(grad: Tensor, residual: Residual | None, factors: Factors) -> Tensor:
    """A buffer with the matrices of `grad` (+ `residual.before`, left in `residual.after`, the matrices alone)."""
    if residual is None:
        return grad
    for matrices in zip(*map(factors.full, (residual.before, residual.after, grad)), strict=True):
        Residual(*matrices[:2]).plus(matrices[2])
    return residual.after


def _remember(leaf: PerParameter, sides: Factors, average: Tensor) -> None:
    """Keep the averaged factor for the next step, as unit vectors; one of zeros would find nothing ever again."""
    before, after = leaf.update()
    kernels.normalize(average, sides, before)
    after.copy_(average)
