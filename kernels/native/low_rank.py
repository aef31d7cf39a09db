"""The products of PowerSGD, and the bases and unit vectors of its factors."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..checks import (
    check_factor,
    check_products,
    end_of,
    known,
    log_unknown,
    on_one_device,
    require,
    separate,
    tensors_of,
)
from ..dispatch import Operation
from ..low_rank import Factors, low_rank_finish, low_rank_left, low_rank_right, normalize, orthogonalize
from ..residual import Residual
from .library import NAME, array, arrays, library

LARGEST_RANK = 32


@low_rank_left.implement(NAME)
def _low_rank_left(grad: Tensor, residual: Residual | None, factors: Factors, q: Tensor, p: Tensor) -> None:
    if not _product(low_rank_left, grad, residual, factors, p, q):
        low_rank_left.reference(grad, residual, factors, q, p)


@low_rank_right.implement(NAME)
def _low_rank_right(matrices: Tensor, factors: Factors, p: Tensor, q: Tensor) -> None:
    if not _product(low_rank_right, matrices, None, factors, p, q):
        low_rank_right.reference(matrices, factors, p, q)


@low_rank_finish.implement(NAME)
def _low_rank_finish(grad: Tensor, residual: Tensor | None, factors: Factors, p: Tensor, q: Tensor) -> None:
    held = None if residual is None else Residual(residual, residual)
    if not _product(low_rank_finish, grad, held, factors, p, q):
        low_rank_finish.reference(grad, residual, factors, p, q)


def _product(
    operation: Operation[..., None], grad: Tensor, residual: Residual | None, factors: Factors, p: Tensor, q: Tensor
) -> bool:
    """Run one of the three products; False where the native code does not know the dtypes or the matrices."""
    if (packed := _known(operation, factors, grad, *tensors_of(residual), p, q)) is None:
        return False
    check_products(grad, residual, factors, p, q)
    given = array(grad), *arrays(residual), array(p), array(q)
    getattr(library(), operation.name)(array(packed), len(packed), *given, torch.get_num_threads())
    return True


@orthogonalize.implement(NAME)
def _orthogonalize(p: Tensor, factors: Factors) -> None:
    if (packed := _known(orthogonalize, factors, p)) is None:
        return orthogonalize.reference(p, factors)
    check_factor("p", p, factors.left_offsets[-1])
    for m in factors.matrices:
        require(m.rank <= m.rows, f"{m.rank} vectors of {m.rows} elements cannot be orthonormal: {m}")
    library().orthogonalize(array(packed), len(packed), array(p), torch.get_num_threads())


@normalize.implement(NAME)
def _normalize(q: Tensor, factors: Factors, previous: Tensor | None = None) -> None:
    if (packed := _known(normalize, factors, q, previous)) is None:
        return normalize.reference(q, factors, previous)
    on_one_device(q=q, previous=previous)
    check_factor("q", q, factors.right_offsets[-1])
    if previous is not None:
        check_factor("previous", previous, factors.right_offsets[-1])
        separate(q=q, previous=previous)
    library().normalize(array(packed), len(packed), array(q), array(previous), torch.get_num_threads())


def _known(operation: Operation[..., None], factors: Factors, *tensors: Tensor | None) -> Tensor | None:
    """The matrices as C++ reads them; None where it does not know them or the dtypes."""
    if not known(NAME, operation, *tensors, dtypes=(torch.float32,)):
        return None
    if (packed := _packed(factors)) is None:
        log_unknown(NAME, operation.name, f"empty matrices and ranks above {LARGEST_RANK}")
    return packed


@functools.lru_cache(maxsize=1024)
def _packed(factors: Factors) -> Tensor | None:
    """A row of int64 for each matrix; None where there are some that C++ does not know."""
    end_of(factors)  # refuses what is no matrix
    if any(m.rank > LARGEST_RANK or not m.rows * m.columns for m in factors.matrices):
        return None
    offsets = zip(factors.matrices, factors.left_offsets, factors.right_offsets, strict=False)
    rows = [(m.offset, m.rows, m.columns, m.rank, left, right) for m, left, right in offsets]
    return torch.tensor(rows, dtype=torch.int64, device="cpu")
