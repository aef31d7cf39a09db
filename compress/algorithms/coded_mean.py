"""Means over ranks in few bits an element, for methods that keep what that loses in a residual of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels import Residual
from ..protocol.layout import Layout
from ..protocol.ranks import Ranks
from ..protocol.requests import Program
from .adapters import TwoShot
from .quantized import Int4, Int8, Quantized
from .zero_rows import ZeroRows

CODECS: dict[str, Quantized] = {"int8": Int8(), "int4": Int4(rotate=True)}  # rotated, factors lose less


def coded_mean(
    codec: str, values: Tensor, ranks: Ranks, rows: ZeroRows | None = None
) -> Program[tuple[Tensor, Tensor]]:
    """The mean over ranks of flat `values`, rounded twice by one of CODECS, and what of this rank's is in it.

    The mean of what the ranks have in it is the mean that is returned, to round-off: a rank answers for what it rounds of
    its own, and as a server of a part of the mean for what it rounds there, as many times as there are ranks. So who holds
    back the rest of `values` loses nothing. `rows`: those that stay zero; by default all of `values` as one.
    """
    if not values.numel():
        return values, values
    mean_of = TwoShot(CODECS[codec])
    state = mean_of.init(Layout(("",), (tuple(values.shape),), values.dtype, values.device, ranks))
    state.rows = rows if rows is not None and state.rows is not None else state.rows
    held = torch.zeros_like(values)
    mean = yield from mean_of.reduce(values.clone(), state, Residual(held, held))
    served = state.server_residual
    assert served is not None
    held[served.start : served.start + served.flat.numel()].add_(served.flat, alpha=served.weight)
    return mean, values.sub(held)
