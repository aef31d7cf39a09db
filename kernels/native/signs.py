"""1-bit payloads."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import FLOATS, WIDE
from ..residual import Residual
from ..signs import sign_pack, sign_unpack_mean
from .library import NAME, NONE, library


@sign_pack.implement(NAME, {"grad": FLOATS, "residual": WIDE})
def _sign_pack(grad: Tensor, residual: Residual | None, scales: Tensor, bits: Tensor, length: int) -> None:
    rows, blocks = scales.shape
    places = grad.numel(), rows, blocks, length // blocks
    library().sign_pack(grad, *(residual or NONE), scales, bits, *places, torch.get_num_threads())


@sign_unpack_mean.implement(NAME, {"out": FLOATS, "residual": WIDE})
def _sign_unpack_mean(scales: Tensor, bits: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
    voters, _, blocks = scales.shape
    block = bits.shape[2] * 8 // blocks
    places = voters, out.numel(), blocks, block
    library().sign_unpack_mean(scales, bits, out, residual, *places, torch.get_num_threads())
