"""Changes of number format."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..casting import cast_scaled, gather_scaled
from ..checks import FLOATS, WIDE, check_gather
from .library import NAME, library


@cast_scaled.implement(NAME, {"source": FLOATS, "out": FLOATS, "residual": WIDE})
def _cast_scaled(source: Tensor, out: Tensor, scale: float, residual: Tensor | None = None) -> None:
    library().cast_scaled(source, out, source.numel(), scale, residual, torch.get_num_threads())


@gather_scaled.implement(NAME, {"out": FLOATS})
def _gather_scaled(out: Tensor, sources: Sequence[Tensor], places: Sequence[int], scale: float) -> None:
    if any(map(Tensor.is_neg, sources)):
        sources = [source.resolve_neg() for source in sources]
    others = library().gather_scaled(out, sources, places, scale, torch.get_num_threads())
    if others or len(sources) != len(places):
        check_gather(out, places, [source.numel() for source in sources])
        gather_scaled.reference(out, [sources[i] for i in others], [places[i] for i in others], scale)
