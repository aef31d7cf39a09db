"""16 bits on the wire: alone, or around another compressor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ... import kernels
from ...kernels import Residual
from ..protocol.compressor import Compressor, Traits, inside, own_traits, traits_of, with_traits
from ..protocol.layout import Layout
from ..protocol.registry import register
from ..protocol.requests import AllGather, AllReduce, Broadcast, Program, ReduceScatter, Request, next_request
from .adapters import TwoShot
from .dense import Dense
from .payload import padded, rounded_once


@with_traits(Traits(takes_16_bits=True, keeps_zeros=True))
@dataclass(frozen=True)
class SixteenBits:
    """A codec: each element in `dtype`, of 16 bits. Means of such rows are taken in float32."""

    dtype: torch.dtype

    def row_length(self, numel: int) -> int:
        """Return `numel` rounded up to a multiple of 8."""
        return -(-numel // 8) * 8

    def row_bytes(self, length: int) -> int:
        """Return 2 bytes an element, padded."""
        return padded(2 * length)

    def encode(self, grad: Tensor, residual: Residual | None, rows: Tensor, length: int) -> None:
        """Round `grad` (+ `residual`) to the nearest; `residual` keeps the difference."""
        if residual is not None:
            grad = residual.before + grad
        codes = rows[:, : 2 * length].view(self.dtype)
        if grad.numel() == codes.numel():
            codes.copy_(grad.view(codes.shape))
        else:
            for part, row in zip(grad.split(length), codes, strict=False):
                kernels.cast_scaled(part, row[: part.numel()], 1.0)
        if residual is not None:
            torch.sub(grad, codes.flatten()[: grad.numel()], out=residual.after)

    def decode(self, rows: Tensor, out: Tensor, length: int, residual: Tensor | None = None) -> None:
        """Write the mean over voters to `out`; what `out` rounds away is added to `residual`."""
        votes = rows[..., : 2 * length].view(self.dtype)

        def write(wide: Tensor) -> None:
            for place, part in enumerate(wide.split(length)):
                rows = votes[:, place, : part.numel()]
                if rows.is_cuda and len(rows) > 1:  # one kernel, not one for each rank
                    torch.sum(rows, 0, dtype=part.dtype, out=part)
                    continue
                kernels.cast_scaled(rows[0], part, 1.0)
                for vote in rows[1:]:
                    part.add_(vote)
            if len(votes) > 1:
                wide.div_(len(votes))

        rounded_once(out, residual, write)


@dataclass
class CastState:
    """Whose gradients they are, whether large payloads are cut, and the inner compressor's state."""

    layout: Layout
    cuts: bool
    inner: Any


def _traits(cast: Cast) -> Traits:
    """Return the traits that the option `sum` decides on."""
    return traits_of(cast.owners) if cast.sum == "float32" else Traits()


@dataclass(frozen=True)
class Cast:
    """The inner compressor's floating-point payloads travel in 16 bits; all else stays as wide as it was.

    `sum`: in 16bit an all-reduce adds up payloads as they travel, and every addition rounds. In float32 each rank adds up
    one part for all, between an all-to-all and an all-gather of 16 bits: the same bytes, and only two roundings however
    many ranks there are. Error feedback is not needed.
    """

    inner: Compressor = Dense()
    sum: Literal["16bit", "float32"] = "16bit"

    dtype: ClassVar[torch.dtype]

    def __post_init__(self) -> None:
        if self.sum not in ("16bit", "float32"):
            raise ValueError(f"{self._name}:sum is 16bit or float32, got {self.sum!r}")
        if self.sum == "float32" and self.inner != Dense():
            raise ValueError(
                f"{self._name}:sum=float32 is of whole gradients, and another compressor is inside, which adds up its own "
                "payloads: leave sum out"
            )
        if packed := next((each for each in inside(self.inner) if own_traits(each).packs_bytes), None):
            method = type(getattr(packed, "codec", packed)).__name__
            raise ValueError(
                f"{method} packs its own bytes, so a 16-bit wrapper would change nothing; "
                f"use the compressor's own option for it (topk has value_dtype=fp16)"
            )

    @property
    def _name(self) -> str:
        return {torch.float16: "fp16", torch.bfloat16: "bf16"}[self.dtype]

    @property
    def owners(self) -> TwoShot:
        """The compressor with sums in float32."""
        return TwoShot(SixteenBits(self.dtype), error_feedback=False)

    def init(self, layout: Layout) -> Any:
        """The inner state."""
        if self.sum == "float32":
            return self.owners.init(layout)
        return CastState(layout, not traits_of(self.inner).forgets_what_it_sends, self.inner.init(layout))

    def reduce(self, grad: Tensor, state: Any, residual: Residual | None = None) -> Program[Tensor]:
        """The inner average, its payloads rounded to 16 bits. Means are divided before they are rounded and summed.

        With sums in 32 bits, gradients are rounded, not divided; their mean is rounded again.
        """
        if self.sum == "float32":
            return (yield from self.owners.reduce(grad, state, residual))
        program, reply = self.inner.reduce(grad, state.inner, residual), None
        average: Tensor
        try:
            while True:
                request, average = next_request(program, reply)
                if request is None:
                    return average
                narrow = self._narrow(request, state)
                reply = (yield request) if narrow is None else self._widen((yield narrow), request)
        finally:
            program.close()

    def _narrow(self, request: Request, state: CastState) -> Request | None:
        wide, layout = request.tensor, state.layout
        if not wide.is_floating_point() or wide.element_size() <= 2:
            return None
        narrow = kernels.temporary(wide.shape, dtype=self.dtype, device=wide.device)
        changed: dict[str, Any] = {"tensor": narrow}
        if isinstance(request, AllReduce | ReduceScatter):
            members = len(layout.ranks.members(request.scope))
            share = 1 / members if request.op == "mean" else 1.0
            shards = layout.ranks.per_host if request.scope == "across" else 1  # a host's ranks may each have one
            if state.cuts and wide.numel() * shards < layout.numel:
                exact = request.exact if isinstance(request, AllReduce) else ()
                self._saturate(wide, largest_summand(self.dtype, members) / share, exact)
            kernels.cast_scaled(wide, narrow, share)
            changed["op"] = "sum" if request.op == "mean" else request.op
        else:
            kernels.cast_scaled(wide, narrow, 1.0)
            if isinstance(request, AllGather):
                changed["within"] = None  # that has wide numbers
        return dataclasses.replace(request, **changed)

    def _widen(self, answer: Tensor, request: Request) -> Tensor:
        """The reply to `request`, in place where it is an all-reduce, as a process group gives it."""
        wide = request.tensor
        reply = (
            wide
            if isinstance(request, AllReduce | Broadcast)
            else torch.empty(answer.shape, dtype=wide.dtype, device=wide.device)
        )
        kernels.cast_scaled(answer, reply, 1.0)
        return reply

    def _saturate(self, wide: Tensor, limit: float, exact: Sequence[tuple[int, int]]) -> None:
        """Keep finite factors within reach of 16 bits: what they miss stays in the residual. A whole gradient overflows.

        So do `exact` parts, and payloads of a compressor that `forgets_what_it_sends`: what was cut of them would be lost.
        """
        if self.dtype == torch.float16:
            kept = [wide.view(-1)[first:end].clone() for first, end in exact]
            wide.copy_(torch.where(wide.isfinite(), wide.clamp(-limit, limit), wide))
            for (first, end), part in zip(exact, kept, strict=True):
                wide.view(-1)[first:end] = part


def largest_summand(dtype: torch.dtype, count: int) -> float:
    """The magnitude up to which so many numbers, rounded to `dtype`, have a finite sum, whatever the order of additions.

    Each number grows by one rounding, and additions in any order enlarge the sum of magnitudes by at most (count - 1) units
    of roundoff (Jeannerod and Rump, "Improved error bounds for inner products in floating-point arithmetic", 2013).
    """
    unit = torch.finfo(dtype).eps / 2
    return torch.finfo(dtype).max / (count * (1 + unit) * (1 + (count - 1) * unit))


@register("fp16", lossy=False, traits=_traits)
@dataclass(frozen=True)
class Float16(Cast):
    """Payloads in float16: half the bytes, 11 bits of precision, nothing below 6e-8; around another method or alone."""

    dtype = torch.float16


@register("bf16", lossy=False, traits=_traits)
@dataclass(frozen=True)
class BFloat16(Cast):
    """Payloads in bfloat16: half the bytes, 8 bits of precision, the range of float32; around another method or alone."""

    dtype = torch.bfloat16
