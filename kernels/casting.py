"""Changes of number format on the way to the wire and back."""

from __future__ import annotations

from torch import Tensor

from .dispatch import operation


@operation
def cast_scaled(source: Tensor, out: Tensor, scale: float) -> None:
    """`out = source * scale`, rounded to nearest in the dtype of `out`.

    The product is taken in the wider of the two dtypes, so scaling comes before narrowing. Any shapes of equal size.
    """
    if scale == 1.0:
        out.copy_(source)
    elif source.element_size() >= out.element_size():
        out.copy_(source * scale)
    else:
        out.copy_(source).mul_(scale)
