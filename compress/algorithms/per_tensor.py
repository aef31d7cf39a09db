"""A method on each tensor of a bucket by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor

from ...kernels import Residual
from ..protocol.compressor import Compressor
from ..protocol.layout import Layout
from ..protocol.requests import Program
from ..protocol.together import together
from ..protocol.traits import Traits, own_traits, with_traits
from .adapters import Gathered

Scope: TypeAlias = Literal["bucket", "tensor"]


@dataclass
class PerTensorState:
    """For each tensor its place, as a slice, and its state."""

    places: tuple[slice, ...]
    states: tuple[Any, ...]


@with_traits(lambda each: Traits(takes_16_bits=own_traits(each.inner).takes_16_bits))
@dataclass(frozen=True)
class PerTensor:
    """The inner compressor on each tensor of a bucket, all of them in the same rounds."""

    inner: Compressor

    def init(self, layout: Layout) -> PerTensorState:
        """A state for each tensor."""
        layouts = [layout.select([index]) for index in range(len(layout.names))]
        places = tuple(slice(first, first + size) for first, size in zip(layout.offsets, layout.sizes, strict=True))
        return PerTensorState(places, tuple(map(self.inner.init, layouts)))

    def reduce(self, grad: Tensor, state: PerTensorState, residual: Residual | None = None) -> Program[Tensor]:
        """Each tensor's average, in its place."""
        programs = []
        for place, inner in zip(state.places, state.states, strict=True):
            held = None if residual is None else Residual(residual.before[place], residual.after[place])
            programs.append(self._one(grad[place], inner, held))
        yield from together(*programs)
        return grad

    def _one(self, part: Tensor, state: Any, residual: Residual | None) -> Program[None]:
        average = yield from self.inner.reduce(part, state, residual)
        if average is not part:
            part.copy_(average)


def gathered(codec: Any) -> Compressor:
    """`Gathered`, for codecs with a `scope`: of a bucket, or of each of its tensors."""
    return PerTensor(Gathered(codec)) if codec.scope == "tensor" else Gathered(codec)


def check_scope(method: str, scope: str) -> None:
    """ValueError for what is neither."""
    if scope not in ("bucket", "tensor"):
        raise ValueError(f"{method}:scope is bucket or tensor, got {scope!r}")
