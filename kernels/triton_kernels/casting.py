"""Changes of number format."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import divided, launched, on_device, options
from .tiles import load_tile, store_mean

TILE = 4096
FEW = 1 << 19  # elements, up to which torch's launch spares the host more time than its kernel costs the device


def cast_scaled(source: Tensor, out: Tensor, scale: float, residual: Tensor | None = None) -> None:
    """`out = source * scale`, the product in float32; what `out` rounds away is added to `residual`."""
    size = source.numel()
    if residual is None and source.is_cuda and size <= FEW and (scale == 1.0 or source.dtype == torch.float32):
        torch.mul(source, scale, out=out)  # the same bits, by a slower kernel
    elif size:
        with on_device(source):
            held = out if residual is None else residual
            _cast[(divided(size, TILE),)](
                source, out, held, scale, size, HELD=residual is not None, TILE=TILE, **options(8)
            )  # fmt: skip


@launched
@triton.jit(do_not_specialize=["scale", "size"])
def _cast(
    source: tl.tensor, out: tl.tensor, residual: tl.tensor, scale: tl.float32, size: tl.int64,
    HELD: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * TILE
    if start + TILE <= size:
        _cast_tile(source, out, residual, scale, start, size, HELD, TILE, True)
    else:
        _cast_tile(source, out, residual, scale, start, size, HELD, TILE, False)


@triton.jit
def _cast_tile(
    source: tl.tensor, out: tl.tensor, residual: tl.tensor, scale: tl.tensor, start: tl.tensor, size: tl.tensor,
    HELD: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    places = start + tl.arange(0, TILE)
    store_mean(out, residual, places, load_tile(source, places, size, WHOLE) * scale, size, HELD, WHOLE)
