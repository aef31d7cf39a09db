"""PowerSGD: low-rank averages by one step of power iteration (Vogels, Karimireddy, Jaggi 2019)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ... import kernels
from ...kernels import Factors, Matrix, Residual
from ..protocol.compressor import Traits, own_traits
from ..protocol.layout import Layout
from ..protocol.registry import register
from ..protocol.requests import AllReduce, Program, together
from ..state.tensors import Chunk, Counter, PerParameter
from .adapters import TwoShot, TwoShotState
from .cuts import Cut, cut_bucket
from .quantized import Int4, Int8, Quantized
from .shared_random import seeded_generator
from .zero_rows import ZeroRows

Means: TypeAlias = Callable[[Tensor, Tensor], Program[Sequence[tuple[Tensor, Tensor]]]]
CODECS: dict[str, Quantized] = {"int8": Int8(), "int4": Int4(rotate=True)}  # rotated, factors lose less


@dataclass
class PowerSGDState:
    """The low-rank parameters and those sent whole; the factors Q (transposed); the steps seen; the layout.

    `means`: average P, and Q, each with what rides along; of both what of this rank's is in the mean, or the mean.
    `of_bucket`: the rows that stay zero of a bucket that is one matrix.
    """

    factors: Factors
    whole: tuple[slice, ...]
    q: PerParameter
    step: Counter
    layout: Layout
    means: tuple[Means, Means]
    of_bucket: ZeroRows | None = None


def _traits(compressor: PowerSGD) -> Traits:
    varies = compressor.rank > kernels.native.LARGEST_RANK
    return Traits(takes_16_bits=True, varies_with_threads=varies, packs_bytes=compressor.payload in CODECS)


@register("powersgd", traits=_traits)
@dataclass(frozen=True)
class PowerSGD:
    """The average gradient of each matrix, of low rank, by power iteration; vectors ride along whole.

    Vogels et al. 2019, algorithm 1. A convolution is a matrix of output channels x (all else). Two all-reduces a bucket.
    Elements of a matrix whose gradient is zero move, unless its row is zero: mask averages, not gradients.

    `rank`: of the factors, capped at the smaller side of each matrix. `min_compression_rate`: a matrix is compressed
    only where that makes it more than so many times smaller. `power_iterations`: a step, each two more all-reduces.
    `warm_start`: begin at the last step's Q, else at a new random one. `seed`: of the private generators for Q, one a
    parameter name, the same on all ranks. `payload`: int8 or int4 sends factors and vectors in 8 or 4 bits an
    element, as `int8` and `int4:rotate=true` do, in twice the rounds; each rank then holds back what its own matrices lack
    of what it sent.
    """

    rank: int = 4
    min_compression_rate: float = 2.0
    power_iterations: int = 1
    warm_start: bool = True
    seed: int = 0
    payload: Literal["float", "int8", "int4"] = "float"

    def __post_init__(self) -> None:
        for option in ("rank", "power_iterations"):
            if getattr(self, option) < 1:
                raise ValueError(f"powersgd:{option} is at least 1, got {getattr(self, option)}")
        if not self.min_compression_rate >= 0:
            raise ValueError(f"powersgd:min_compression_rate is at least 0, got {self.min_compression_rate}")
        if self.payload not in ("float", *CODECS):
            raise ValueError(f"powersgd:payload is float, int8 or int4, got {self.payload!r}")

    def init(self, layout: Layout) -> PowerSGDState:
        """Random Q for each matrix worth compressing."""
        if layout.dtype.itemsize < 4:
            raise TypeError(
                f"PowerSGD needs 32 bits or more for its arithmetic, not {layout.dtype}: wrap it in Float32Arithmetic"
            )
        matrices: dict[int, Matrix] = {}
        whole, entries = [], []
        for index, (shape, offset, size) in enumerate(zip(layout.shapes, layout.offsets, layout.sizes, strict=True)):
            if matrix := self.as_matrix(shape, offset):
                matrices[index] = matrix
            elif size:
                whole.append((offset, size))
                entries.append(index)
        shapes = tuple((m.rank, m.columns) for m in matrices.values())
        q = PerParameter.zeros(dataclasses.replace(layout.select(matrices), shapes=shapes, row_sizes=()), optional=True)
        draw_normal(q.layout, q.flat, self.seed, step=0)
        factors = Factors(tuple(matrices.values()))
        average: tuple[Means, Means] = means, means
        if self.payload in CODECS:
            average = coded_means(self.payload, factors, q.layout, layout.select(entries))
        return PowerSGDState(factors, joined(whole), q, Counter(), layout, average)

    def as_matrix(self, shape: tuple[int, ...], offset: int) -> Matrix | None:
        """The matrix that a parameter is compressed as; None where it is sent whole."""
        if len(shape) < 2 or not math.prod(shape):
            return None
        rows, columns = shape[0], math.prod(shape[1:])
        rank = min(self.rank, rows, columns)
        smaller = rank * (rows + columns) * self.min_compression_rate < rows * columns
        return Matrix(offset, rows, columns, rank) if smaller else None

    def reduce(self, grad: Tensor, state: PowerSGDState, residual: Residual | None = None) -> Program[Tensor]:
        """The low-rank average; what does not compress rides in the same round as P."""
        first, following = state.q.update()
        if not self.warm_start:
            draw_normal(state.q.layout, following, self.seed, state.step.value)
            first = following
        state.step.value += 1
        factors, q = state.factors, first.clone()
        matrices = grad if residual is None else residual.after
        for iteration in range(self.power_iterations):
            p = q.new_empty(factors.left_offsets[-1])
            if iteration == 0:
                kernels.low_rank_left(grad, residual, factors, q, p)
                whole = taken_whole(grad, state.whole, residual, q.dtype)
                (p, _), (mean, own) = yield from state.means[0](p, whole)
                put_whole(mean, None if own is mean else whole.sub_(own), grad, state.whole, residual)
            else:
                kernels.normalize(q, factors, first)
                kernels.low_rank_left(matrices, None, factors, q, p)
                (p, _), _ = yield from state.means[0](p, q[:0])
            kernels.orthogonalize(p, factors)
            kernels.low_rank_right(matrices, factors, p, q)
            (q, sent), _ = yield from state.means[1](q, q[:0])
        finish(grad, None if residual is None else residual.after, factors, (p, q), (p, sent))
        kernels.normalize(q, factors, first)  # a Q of zeros would find nothing ever again
        following.copy_(q)
        return grad


def finish(
    grad: Tensor, held: Tensor | None, factors: Factors, mean: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor]
) -> None:
    """The mean's P Qᵀ in place of the matrices of `grad`; `held` loses this rank's own, and keeps what rounding loses."""
    if held is not None and any(one is not all_of for one, all_of in zip(own, mean, strict=True)):
        if grad.dtype == held.dtype:
            kernels.low_rank_finish(grad, held, factors, *own)
            held = None
        else:  # what is rounded of the mean's is taken out below; here, exactly, what lies between the two
            between = (one if one is all_of else one - all_of for one, all_of in zip(own, mean, strict=True))
            kernels.low_rank_finish(torch.empty_like(grad, dtype=held.dtype), held, factors, *between)
    kernels.low_rank_finish(grad, held, factors, *mean)


def draw_normal(layout: Layout, flat: Tensor, seed: int, step: int) -> None:
    """Standard normal factors for every parameter, from a generator of its own; no wait for a GPU."""
    if flat.device.type == "meta":
        return
    drawn = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=flat.is_cuda)
    for name, view in layout.views(drawn).items():
        generator = seeded_generator(seed, step, name)
        view.copy_(torch.randn(view.shape, generator=generator, dtype=view.dtype, device="cpu"))
    flat.copy_(drawn, non_blocking=True)  # torch keeps pinned memory for the copy until that is done


def means(factor: Tensor, whole: Tensor) -> Program[Sequence[tuple[Tensor, Tensor]]]:
    """The means of a factor and of numbers that nobody may cut, in one round, each twice: see `PowerSGD`."""
    sizes = [factor.numel(), whole.numel()]
    payload, exact = (torch.cat([factor, whole]), ((sizes[0], sum(sizes)),)) if whole.numel() else (factor, ())
    if payload.numel():
        payload = yield AllReduce(payload, exact=exact)
    return [(mean, mean) for mean in payload.split(sizes)]


def taken_whole(grad: Tensor, places: tuple[slice, ...], residual: Residual | None, dtype: torch.dtype) -> Tensor:
    """Scattered parts of a bucket, with what is held back of them, in the dtype of arithmetic."""
    if not places:
        return grad.new_empty(0, dtype=dtype)
    values = torch.cat([grad[place] for place in places]).to(dtype)
    return values if residual is None else values.add_(torch.cat([residual.before[place] for place in places]))


def put_whole(
    mean: Tensor, left: Tensor | None, grad: Tensor, places: tuple[slice, ...], residual: Residual | None
) -> None:
    """Put the mean of such parts back, and hold back what was `left` of this rank's; None where all of it was sent."""
    if not places:
        return
    parts = [grad[place] for place in places]
    put_back(mean, parts)
    if residual is None:
        return
    after = [residual.after[place] for place in places]
    if mean.dtype != grad.dtype:
        lost = mean - torch.cat(parts)  # what 16 bits cannot hold
        left = lost if left is None else left.add_(lost)
    if left is None:
        torch._foreach_zero_(after)
    else:
        put_back(left, after)


@register("batched-powersgd", traits=lambda each: dataclasses.replace(_traits(each), ignores_shapes=True))
@dataclass(frozen=True)
class BatchedPowerSGD(PowerSGD):
    """PowerSGD over the whole bucket as one near-square matrix: least bytes and arithmetic, roughest average.

    The rows and columns are chosen so that few elements are left over; these ride along whole, and the bucket is neither
    copied nor resized. Elements whose gradient is zero move: mask averages, not gradients.
    """

    def init(self, layout: Layout) -> PowerSGDState:
        """The state of a bucket with one matrix, kept under its first parameter's name."""
        rows, columns = near_square(layout.numel, min(self.rank, math.isqrt(layout.numel) or 1))
        left_over = layout.numel - rows * columns
        names, shapes = (layout.names[0], "left over"), ((rows, columns), (left_over,))
        starts = (layout.starts[0], 0) if layout.starts else ()
        state = super().init(dataclasses.replace(layout, names=names, shapes=shapes, starts=starts, row_sizes=()))
        state.of_bucket = ZeroRows.of_layout(layout)
        return state

    def reduce(self, grad: Tensor, state: PowerSGDState, residual: Residual | None = None) -> Program[Tensor]:
        """The low-rank average; rows of parameters that are zero on all ranks stay zero, by a bit of each."""
        return (yield from zeros_kept(super().reduce(grad, state, residual), grad, state, residual))


def zeros_kept(program: Program[Tensor], grad: Tensor, state: Any, residual: Residual | None) -> Program[Tensor]:
    """The average by a program, its rows cleared that are zero on all ranks. `state.of_bucket`: the bucket's rows."""
    rows: ZeroRows = state.of_bucket
    looked = rows.used(grad, residual)  # before the program writes over it
    results: list[Tensor] = yield from together(program, rows.used_anywhere(looked))
    average, used = results
    rows.clear(used, average)
    if residual is not None:
        rows.clear(used, residual.after)
    return average


def near_square(numel: int, rank: int) -> tuple[int, int]:
    """Rows and columns, within 20 % of a square, whose factors and left-over elements are fewest."""

    def sent(rows: int) -> int:
        return rank * (rows + numel // rows) + numel % rows

    side = max(1, math.isqrt(numel))
    rows = min(range(side, math.floor(0.8 * side), -1), key=sent)
    return rows, numel // rows


def joined(places: Iterable[tuple[int, int]]) -> tuple[slice, ...]:
    """The elements of places, (first, elements), in the same order and in as few slices as can be.

    >>> joined([(0, 3), (3, 2), (7, 1)])
    (slice(0, 5, None), slice(7, 8, None))
    """
    found: list[slice] = []
    for first, size in places:
        start = found.pop().start if found and found[-1].stop == first else first
        found.append(slice(start, first + size))
    return tuple(found)


def put_back(flat: Tensor, parts: list[Tensor]) -> None:
    """Copy consecutive pieces of `flat` into `parts`."""
    torch._foreach_copy_(parts, list(flat.split([part.numel() for part in parts])))


@dataclass(frozen=True)
class CodedMean:
    """The mean over ranks of numbers in few bits: their codec and layout, its cut, and the rows that stay zero."""

    codec: Quantized
    layout: Layout
    cut: Cut
    rows: ZeroRows | None

    def mean(self, values: Tensor) -> Program[tuple[Tensor, Tensor]]:
        """The mean over ranks of flat `values`, rounded twice, and what of this rank's is in it.

        The mean of what the ranks have in it is the mean that is returned, to round-off: a rank answers for what it rounds
        of its own, and as a server of a part of the mean for what it rounds there, as many times as there are ranks. So
        who holds back the rest of `values` loses nothing.
        """
        if not values.numel():
            return values, values
        served, held = Chunk.zeros(self.layout, *self.cut.served), torch.zeros_like(values)
        state = TwoShotState(served, self.cut, self.layout.ranks.world_size, None, self.rows)
        mean = yield from TwoShot(self.codec).reduce(values.clone(), state, Residual(held, held))
        held[served.start : served.start + served.flat.numel()].add_(served.flat, alpha=served.weight)
        return mean, values.sub(held)


def coded_mean(payload: str, layout: Layout, rows: ZeroRows | None = None) -> CodedMean:
    """Return the mean by one of CODECS. `rows`: those that stay zero; by default those of the layout."""
    codec, ranks = CODECS[payload], layout.ranks
    kept = None if own_traits(codec).keeps_zeros else rows or ZeroRows.of_layout(layout)
    return CodedMean(codec, layout, cut_bucket(codec, layout, ranks.world_size, ranks.rank), kept)


def coded_means(payload: str, factors: Factors, q: Layout, whole: Layout) -> tuple[Means, Means]:
    """Return the means of P and of Q, each with what is sent whole."""
    p = dataclasses.replace(q, shapes=tuple((m.rank, m.rows) for m in factors.matrices), starts=())
    starts = (*(0 for _ in p.names), *whole.starts) if whole.starts else ()
    both = dataclasses.replace(p, names=p.names + whole.names, shapes=p.shapes + whole.shapes, starts=starts)
    rows = ZeroRows.of_factors(factors)
    of_p = coded_mean(payload, p, rows), coded_mean(payload, both, rows.before(ZeroRows.of_layout(whole), p.numel))
    of_q = coded_mean(payload, q)
    return partial(_mean_of_both, *of_p), partial(_mean_of_both, of_q, of_q)


def _mean_of_both(
    alone: CodedMean, beside: CodedMean, factor: Tensor, whole: Tensor
) -> Program[Sequence[tuple[Tensor, Tensor]]]:
    """The means of a factor and of what is sent whole, in the same rounds."""
    if not whole.numel():
        return [(yield from alone.mean(factor)), (whole, whole)]
    sizes = [factor.numel(), whole.numel()]
    mean, own = yield from beside.mean(torch.cat([factor, whole]))
    return list(zip(mean.split(sizes), own.split(sizes), strict=True))
