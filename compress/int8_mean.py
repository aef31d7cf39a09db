"""Means over ranks in 8 bits an element, for methods that keep what that loses in a residual of their own."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..kernels import Residual
from .adapters import TwoShot
from .protocol import Layout, Program
from .quantized import Int8


def int8_mean(values: Tensor, ranks: Layout) -> Program[tuple[Tensor, Tensor]]:
    """The mean over ranks of flat `values`, rounded twice as `int8` does, and what of this rank's is in it.

    The mean of what the ranks have in it is the mean that is returned, to round-off: a rank answers for what it rounds of
    its own, and as a server of a part of the mean for what it rounds there, as many times as there are ranks. So who holds
    back the rest of `values` loses nothing. `ranks`: a layout of whichever parameters, for how many ranks there are.
    """
    if not values.numel():
        return values, values
    place = dataclasses.replace(ranks, names=("",), shapes=(tuple(values.shape),), dtype=values.dtype, starts=())
    state = _MEAN.init(place)
    held = torch.zeros_like(values)
    mean = yield from _MEAN.reduce(values.clone(), state, Residual(held, held))
    served = state.server_residual
    held[served.start : served.start + served.flat.numel()].add_(served.flat, alpha=served.weight)
    return mean, values.sub(held)


_MEAN = TwoShot(Int8())
