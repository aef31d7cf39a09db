"""Casts, the look for what is not finite, and 1-bit payloads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..casting import cast_scaled, gather_scaled
from ..checks import check_cast, check_gather, check_sign_pack, check_sign_unpack_mean, known, tensors_of
from ..finite import all_finite
from ..residual import Residual
from ..signs import sign_pack, sign_unpack_mean
from .library import NAME, array, arrays, library


@cast_scaled.implement(NAME)
def _cast_scaled(source: Tensor, out: Tensor, scale: float) -> None:
    if not known(NAME, cast_scaled, source, out):
        return cast_scaled.reference(source, out, scale)
    check_cast(source, out)
    library().cast_scaled(array(source), array(out), source.numel(), scale, torch.get_num_threads())


@gather_scaled.implement(NAME)
def _gather_scaled(out: Tensor, sources: Sequence[Tensor], places: Sequence[int], scale: float) -> None:
    if any(map(Tensor.is_neg, sources)):
        sources = [source.resolve_neg() for source in sources]
    others = library().gather_scaled(out, sources, places, scale, torch.get_num_threads())
    if others or len(sources) != len(places):
        known(NAME, gather_scaled, out)
        check_gather(out, places, [source.numel() for source in sources])
        gather_scaled.reference(out, [sources[i] for i in others], [places[i] for i in others], scale)


@all_finite.implement(NAME)
def _all_finite(tensor: Tensor) -> Tensor:
    if not (known(NAME, all_finite, tensor) and tensor.is_contiguous()):
        return all_finite.reference(tensor)
    verdict = library().all_finite(array(tensor), tensor.numel(), torch.get_num_threads())
    return torch.tensor(verdict, device="cpu")


@sign_pack.implement(NAME)
def _sign_pack(grad: Tensor, residual: Residual | None, scales: Tensor, bits: Tensor, length: int) -> None:
    if not (known(NAME, sign_pack, grad) and known(NAME, sign_pack, *tensors_of(residual), dtypes=(torch.float32,))):
        return sign_pack.reference(grad, residual, scales, bits, length)
    check_sign_pack(grad, residual, scales, bits, length)
    rows, blocks = scales.shape
    given = array(grad), *arrays(residual), array(scales), array(bits)
    library().sign_pack(*given, grad.numel(), rows, blocks, length // blocks, torch.get_num_threads())


@sign_unpack_mean.implement(NAME)
def _sign_unpack_mean(scales: Tensor, bits: Tensor, out: Tensor) -> None:
    if not known(NAME, sign_unpack_mean, out):
        return sign_unpack_mean.reference(scales, bits, out)
    check_sign_unpack_mean(scales, bits, out)
    voters, _, blocks = scales.shape
    block = bits.shape[2] * 8 // blocks
    given = array(scales), array(bits), array(out)
    library().sign_unpack_mean(*given, voters, out.numel(), blocks, block, torch.get_num_threads())
