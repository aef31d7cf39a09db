"""Casts, the look for what is not finite, and 1-bit payloads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..casting import cast_scaled, gather_scaled
from ..checks import FLOATS, WIDE, check_gather
from ..finite import all_finite, with_gaps
from ..residual import Residual
from ..signs import sign_pack, sign_unpack_mean
from .library import NAME, NONE, library


@cast_scaled.implement(NAME, {"source": FLOATS, "out": FLOATS})
def _cast_scaled(source: Tensor, out: Tensor, scale: float) -> None:
    library().cast_scaled(source, out, source.numel(), scale, torch.get_num_threads())


@gather_scaled.implement(NAME, {"out": FLOATS})
def _gather_scaled(out: Tensor, sources: Sequence[Tensor], places: Sequence[int], scale: float) -> None:
    if any(map(Tensor.is_neg, sources)):
        sources = [source.resolve_neg() for source in sources]
    others = library().gather_scaled(out, sources, places, scale, torch.get_num_threads())
    if others or len(sources) != len(places):
        check_gather(out, places, [source.numel() for source in sources])
        gather_scaled.reference(out, [sources[i] for i in others], [places[i] for i in others], scale)


@all_finite.implement(NAME, {"tensor": FLOATS}, unless=with_gaps)
def _all_finite(tensor: Tensor) -> Tensor:
    verdict = library().all_finite(tensor, tensor.numel(), torch.get_num_threads())
    return torch.tensor(verdict, device="cpu")


@sign_pack.implement(NAME, {"grad": FLOATS, "residual": WIDE})
def _sign_pack(grad: Tensor, residual: Residual | None, scales: Tensor, bits: Tensor, length: int) -> None:
    rows, blocks = scales.shape
    places = grad.numel(), rows, blocks, length // blocks
    library().sign_pack(grad, *(residual or NONE), scales, bits, *places, torch.get_num_threads())


@sign_unpack_mean.implement(NAME, {"out": FLOATS})
def _sign_unpack_mean(scales: Tensor, bits: Tensor, out: Tensor) -> None:
    voters, _, blocks = scales.shape
    block = bits.shape[2] * 8 // blocks
    library().sign_unpack_mean(scales, bits, out, voters, out.numel(), blocks, block, torch.get_num_threads())
