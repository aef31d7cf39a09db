"""Orthonormal bases and unit vectors of PowerSGD's factors, laid out as low_rank.py says."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .argument_checks import check_normalize, check_orthogonalize
from .dispatch import operation
from .operands import Factors


@operation(check=check_orthogonalize)
def orthogonalize(p: Tensor, factors: Factors) -> None:
    """Replace each P by a matrix with orthonormal columns that span its columns, in place.

    Householder QR: zero and rank-deficient columns are completed to an orthonormal set, any finite scale survives, and a
    P with a non-finite element becomes NaN. Rows of zeros stay so in all columns but those that complete the set. Factors of
    one shape go in one call.
    """
    for batch in _alike(factors.left(p)):
        bases = orthonormal_columns(torch.stack(batch).mT)
        torch._foreach_copy_(batch, list(bases.mT))


@operation(check=check_normalize, apart=[("q", "previous")])
def normalize(q: Tensor, factors: Factors, previous: Tensor | None = None) -> None:
    """Scale each factor vector of Q to length 1, in place; a zero vector becomes that of `previous` (None: stays zero).

    The span is all that the next step needs of Q, and P = M Q then has the scale of M, not of its square: 16 bits hold it.
    """
    befores = _alike(factors.right(q if previous is None else previous))
    for batch, before in zip(_alike(factors.right(q)), befores, strict=True):
        vectors = torch.stack(batch)
        largest = vectors.abs().amax(dim=2, keepdim=True)
        scaled = vectors / torch.where(largest == 0, torch.ones_like(largest), largest)
        length = scaled.norm(dim=2, keepdim=True)
        unit = scaled / torch.where(length == 0, torch.ones_like(length), length)
        torch._foreach_copy_(batch, list(torch.where(length == 0, torch.stack(before), unit)))


def _alike(parts: Iterator[Tensor]) -> list[list[Tensor]]:
    """Factors by shape, so that those of one shape go in one call."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for part in parts:
        by_shape.setdefault(part.shape, []).append(part)
    return list(by_shape.values())


def orthonormal_columns(matrices: Tensor) -> Tensor:
    """Orthonormal bases of the columns of `matrices`, both (matrices, rows, rank) with rank <= rows."""
    scale = matrices.abs().amax(dim=(1, 2), keepdim=True)
    # At most 1 in magnitude: squares then neither overflow nor vanish.
    scaled = matrices / torch.where(scale == 0, torch.ones_like(scale), scale)
    # Rows of zeros last: reflections fill in the first rows, and leave zeros below as they are.
    order = (scaled == 0).all(2).to(torch.uint8).argsort(dim=1, stable=True).unsqueeze(2).expand_as(scaled)
    basis = torch.linalg.qr(scaled.gather(1, order)).Q
    basis = torch.empty_like(basis).scatter_(1, order, basis)
    return torch.where(scaled.isfinite().all(dim=(1, 2), keepdim=True), basis, torch.full_like(basis, torch.nan))
