"""A low-rank core in 8 bits, and what a gradient lacks of it in few bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...kernels import Residual
from ..protocol.compressor import Compressor
from ..protocol.layout import Layout
from ..protocol.registry import register
from ..protocol.requests import Program
from .adapters import TwoShot
from .powersgd import PowerSGD, PowerSGDState, joined, put_back
from .quantized import Int2, Int4, Int8, Quantized, traits_of_codes


@dataclass
class CoreState:
    """The places of the matrices that have a core, and the states of their cores and of the rest of the bucket."""

    places: tuple[slice, ...]
    low: PowerSGDState
    rest: Any


@dataclass(frozen=True)
class Core:
    """The low-rank average of each matrix by PowerSGD, and the average of the rest by a codec.

    The rest is what a rank's own gradient, with its residual, lacks of its part of the core: for vectors, and matrices too
    small for a core, all of it. Errors of the codec are those of the rest alone, which has small singular values. Muon
    makes all singular values of an update equal, those of the codec's errors, too. The rest travels behind the core, not in
    two rounds less beside its Q: so it also has what the core's 8 bits lose.
    """

    low: PowerSGD
    rest: Compressor

    def init(self, layout: Layout) -> CoreState:
        """The states of both."""
        members = [index for index, shape in enumerate(layout.shapes) if self.low.as_matrix(shape, 0)]
        places = joined((layout.offsets[index], layout.sizes[index]) for index in members)
        return CoreState(places, self.low.init(layout.select(members)), self.rest.init(layout))

    def reduce(self, grad: Tensor, state: CoreState, residual: Residual | None = None) -> Program[Tensor]:
        """The sum of both averages."""
        if not state.places:
            return (yield from self.rest.reduce(grad, state.rest, residual))
        matrices = self._parts(grad, state)
        joint = torch.cat(matrices)
        left = torch.zeros_like(joint) if residual is None else torch.cat(self._parts(residual.before, state))
        core: Any = yield from self.low.reduce(joint, state.low, Residual(left, left))
        if residual is not None:
            grad.add_(residual.before)  # for the others: `put_back` overwrites the matrices
            residual = Residual(residual.after.zero_(), residual.after)
        put_back(left, matrices)
        del left, matrices  # their memory is free while the rest travels
        average = yield from self.rest.reduce(grad, state.rest, residual)
        parts = self._parts(average, state)
        torch._foreach_add_(parts, list(core.split([part.numel() for part in parts])))
        return average

    def _parts(self, flat: Tensor, state: CoreState) -> list[Tensor]:
        return [flat[place] for place in state.places]


def averaged(codec: Quantized) -> Compressor:
    """Return the compressor that averages by a codec, with a core if it asks for one."""
    if not codec.core:
        return TwoShot(codec)
    return Core(PowerSGD(codec.core, payload="int8"), TwoShot(replace(codec, core=0)))


# Not in quantized.py, which powersgd.py imports.
register("int8", adapter=averaged, error_feedback=False, traits=traits_of_codes)(Int8)
register("int4", adapter=averaged, traits=traits_of_codes)(Int4)
register("int2", adapter=averaged, traits=traits_of_codes)(Int2)
