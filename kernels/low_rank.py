"""The products of PowerSGD, over all matrices of a bucket at once; bases.py has the bases of their factors.

Vogels, Karimireddy, Jaggi 2019, algorithm 1.

`Factors` says where each matrix M (rows x columns, row-major) lies in the flat bucket, and where its factors lie in flat
buffers of their own. P (rows x rank) and Q (columns x rank) are stored transposed, one factor vector behind the other:
each product then reads memory in order (measured at rank 4: up to ten times faster than the other way round). Gradients
may have 16 bits; all else, and all arithmetic, has 32 or more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .argument_checks import check_finish, check_left, check_right
from .dispatch import operation
from .operands import Factors, Residual


@operation(check=check_left, apart=[("grad", "residual", "p", "q")])
def low_rank_left(grad: Tensor, residual: Residual | None, factors: Factors, q: Tensor, p: Tensor) -> None:
    """`P = M Q`, where M is `grad` + `residual.before`, left in `residual.after`; without a residual M is `grad`.

    Of `residual.after` the elements of the matrices are written, and no others.
    """
    sums = factors.full(grad)
    if residual is not None:
        parts = map(Residual, factors.full(residual.before), factors.full(residual.after))
        sums = (part.plus(g) for part, g in zip(parts, factors.full(grad), strict=True))
    for m, right, left in zip(sums, factors.right(q), factors.left(p), strict=True):
        left.copy_(torch.mm(m.to(right.dtype), right.T).T)


@operation(check=check_right, apart=[("matrices", "p", "q")])
def low_rank_right(matrices: Tensor, factors: Factors, p: Tensor, q: Tensor) -> None:
    """`Q = M^T P`."""
    for m, left, right in zip(factors.full(matrices), factors.left(p), factors.right(q), strict=True):
        torch.mm(left, m.to(left.dtype), out=right)


@operation(check=check_finish, apart=[("grad", "residual", "p", "q")])
def low_rank_finish(grad: Tensor, residual: Tensor | None, factors: Factors, p: Tensor, q: Tensor) -> None:
    """`P Q^T` into `grad`, rounded once where that has 16 bits; `residual`, which holds M, keeps M - `grad`."""
    held = [None] * len(factors.matrices) if residual is None else factors.full(residual)
    for g, r, left, right in zip(factors.full(grad), held, factors.left(p), factors.right(q), strict=True):
        g.copy_(torch.mm(left.T, right))
        if r is not None:
            r.sub_(g)
