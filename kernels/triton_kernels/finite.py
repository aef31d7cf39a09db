"""Checks for numbers that are not finite."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import divided, launched, on_device, options
from .tiles import load_tile

TILE = 4096


def all_finite(tensor: Tensor) -> Tensor:
    """A boolean scalar, true unless a program finds an element that is not finite."""
    all_finite = torch.ones((), dtype=torch.bool, device=tensor.device)
    if size := tensor.numel():
        with on_device(tensor):
            _refute[(divided(size, TILE),)](tensor, all_finite.view(torch.uint8), size, TILE=TILE, **options(8))
    return all_finite


@launched
@triton.jit(do_not_specialize=["size"])
def _refute(tensor: tl.tensor, all_finite: tl.tensor, size: tl.int64, TILE: tl.constexpr) -> None:
    start = tl.program_id(0).to(tl.int64) * TILE
    if start + TILE <= size:
        _refute_tile(tensor, all_finite, start + tl.arange(0, TILE), size, True)
    else:
        _refute_tile(tensor, all_finite, start + tl.arange(0, TILE), size, False)


@triton.jit
def _refute_tile(
    tensor: tl.tensor, all_finite: tl.tensor, places: tl.tensor, size: tl.tensor, WHOLE: tl.constexpr
) -> None:
    values = load_tile(tensor, places, size, WHOLE)
    finite = tl.min((tl.abs(values) < float("inf")).to(tl.int32), 0)  # NaN is not less
    tl.store(all_finite, 0, mask=finite == 0)  # whoever writes writes the same
