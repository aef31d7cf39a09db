"""`sign_pack` on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import FLOATS, WIDE
from ..residual import Residual
from ..signs import sign_pack
from . import module
from .module import FORMATS, addresses, packed

WARPS = 8  # of a thread block
PART = 1024  # elements that a warp holds in registers
CHUNK = WARPS * PART  # a thread block


def _rotated(
    grad: Tensor, residual: Residual | None, scales: Tensor, bits: Tensor, length: int, signs: Tensor | None = None
) -> str:
    return "" if signs is None else "rotated blocks"


@sign_pack.implement(module.NAME, {"grad": FLOATS, "residual": WIDE}, unless=_rotated)
def encode_signs(
    grad: Tensor, residual: Residual | None, scales: Tensor, bits: Tensor, length: int, signs: Tensor | None = None
) -> None:
    """`sign_pack`: one pass for blocks of up to 8192 elements, two for longer ones."""
    rows, row_blocks = scales.shape
    block = length // row_blocks
    chunks = -(-block // CHUNK)
    sums = torch.empty(rows * row_blocks * chunks if chunks > 1 else 0, device=grad.device)
    arguments = packed(
        grad=grad.data_ptr(),
        **addresses(residual),
        scales=scales.data_ptr(),
        scales_stride=scales.stride(0),
        bits=bits.data_ptr(),
        bits_stride=bits.stride(0),
        numel=grad.numel(),
        blocks=rows * row_blocks,
        row_blocks=row_blocks,
        block=block,
        sums=sums.data_ptr(),
        chunks=chunks,
    )
    stages = _stages(FORMATS[grad.dtype], rows * row_blocks, block, residual is not None)
    module.launch("signs", grad.device, arguments, stages)


def _stages(number: str, blocks: int, block: int, held: bool) -> list[tuple[str, int]]:
    if block <= PART:
        return [(f"sign_pack_warp_{number}", -(-blocks // WARPS))]
    if block <= CHUNK:
        return [(f"sign_pack_block_{number}", blocks)]
    pieces = blocks * -(-block // CHUNK)
    rest = [("sign_pack_rest", pieces)] if held else []
    return [(f"sign_pack_chunk_{number}", pieces), ("sign_pack_scale", blocks), *rest]
