"""Changes of number format on the way to the wire and back."""

from __future__ import annotations

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
