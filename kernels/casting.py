"""Changes of number format on the way to the wire and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import operation


@operation
def cast_scaled(source: Tensor, out: Tensor, scale: float) -> None:
    """`out = source * scale`, rounded to nearest in the dtype of `out`.

    The product is taken in the narrowest dtype that holds both, so scaling comes before narrowing. Equal shapes.
    """
    wide = torch.promote_types(source.dtype, out.dtype)
    if scale == 1.0:
        out.copy_(source)
    elif wide == out.dtype:
        out.copy_(source).mul_(scale)
    else:
        out.copy_(source.to(wide) * scale)


@operation
def gather_scaled(out: Tensor, sources: Sequence[Tensor], targets: Sequence[Tensor], scale: float) -> None:
    """`target = source * scale` for each source and its target, a part of `out`. Equal shapes, all of one dtype.

    A source may be its target; else it shares no memory with `out`.
    """
    if scale == 1.0 or out.is_cuda:
        torch._foreach_copy_(list(targets), list(sources))
        if scale != 1.0:
            torch._foreach_mul_(list(targets), scale)
    else:
        for source, target in zip(sources, targets, strict=True):
            torch.mul(source, scale, out=target)
