"""Changes of number format on the way to the wire and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .argument_checks import check_cast
from .dispatch import operation

LARGE = 1 << 15  # bytes; copying smaller ones one by one costs more than it saves


@operation(check=check_cast, apart=[("source", "out", "residual")])
def cast_scaled(source: Tensor, out: Tensor, scale: float, residual: Tensor | None = None) -> None:
    """`out = source * scale`, rounded to nearest in the dtype of `out`; what that rounds away is added to `residual`.

    The product is taken in the narrowest dtype that holds both, so scaling comes before narrowing. Equal shapes.
    `residual`: float32 or wider, as `source` then has to be.
    """
    wide = torch.promote_types(source.dtype, out.dtype)
    if residual is not None:
        product = source * scale
        out.copy_(product)
        residual.add_(product.sub_(out))
    elif scale == 1.0:
        out.copy_(source)
    elif wide == out.dtype:
        out.copy_(source).mul_(scale)
    else:
        out.copy_(source.to(wide) * scale)


@operation
def gather_scaled(out: Tensor, sources: Sequence[Tensor], places: Sequence[int], scale: float) -> None:
    """`out[place : place + source.numel()] = source.view(-1) * scale` for each source and its place. All of one dtype.

    A source may lie at its place already; else it shares no memory with `out`.
    """
    targets = [out[place : place + source.numel()] for source, place in zip(sources, places, strict=True)]
    flat = [source.reshape(-1) for source in sources]
    if scale == 1.0 or out.is_cuda:
        torch._foreach_copy_(targets, flat)
        if scale != 1.0:
            torch._foreach_mul_(targets, scale)
        return
    small: list[tuple[Tensor, Tensor]] = []
    for source, target in zip(flat, targets, strict=True):
        if source.nbytes < LARGE:
            small.append((source, target))
        else:
            torch.mul(source, scale, out=target)
    if small:
        scaled = torch._foreach_mul([source for source, _ in small], scale)  # in place it rounds the factor to 16 bits
        torch._foreach_copy_([target for _, target in small], scaled)
