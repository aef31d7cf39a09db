"""Changes of number format."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import divided, on_device, options
from .tiles import load_tile, store_tile

TILE = 4096
FEW = 1 << 19  # elements, up to which torch's launch spares the host more time than its kernel costs the device


def cast_scaled(source: Tensor, out: Tensor, scale: float) -> None:
    """`out = source * scale`, the product in float32."""
    size = source.numel()
    if source.is_cuda and size <= FEW and (scale == 1.0 or source.dtype == torch.float32):
        torch.mul(source, scale, out=out)  # the same bits, by a slower kernel
    elif size:
        with on_device(source):
            _cast[(divided(size, TILE),)](source, out, scale, size, TILE=TILE, **options(8))


@triton.jit(do_not_specialize=["scale", "size"])
def _cast(source: tl.tensor, out: tl.tensor, scale: tl.float32, size: tl.int64, TILE: tl.constexpr) -> None:
    start = tl.program_id(0).to(tl.int64) * TILE
    if start + TILE <= size:
        _cast_tile(source, out, scale, start, size, TILE, True)
    else:
        _cast_tile(source, out, scale, start, size, TILE, False)


@triton.jit
def _cast_tile(
    source: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    start: tl.tensor,
    size: tl.tensor,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    places = start + tl.arange(0, TILE)
    store_tile(out, places, load_tile(source, places, size, WHOLE) * scale, size, WHOLE)
