"""The operations in C++ for CPUs: vector instructions chosen at run time, on `torch.get_num_threads()` threads.

Optional: `setup.py` builds the extension where it finds a compiler. Tensors of dtypes that it does not know go to the
reference, which is logged once. The same selection and bits as the reference; sums differ by their rounding only, and the
results of a number of threads are always the same.
"""

from __future__ import annotations

import functools
import logging
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..casting import cast_scaled
from ..dispatch import Operation, register_backend
from ..low_rank import Factors, low_rank_finish, low_rank_left, low_rank_right
from ..selection import scatter_mean, select_largest
from ..signs import sign_pack, sign_unpack_mean
from .checks import address, flat, require, rows_of, separate

logger = logging.getLogger(__name__)
NAME = "native"
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
INDICES = (torch.int32, torch.int64)
LARGEST_RANK = 32


def _probe() -> str:
    try:
        _library()
    except ImportError as error:
        return f"the extension is not built ({error}); reinstall gradwire where there is a C++17 compiler"
    return ""


@functools.cache
def _library() -> Any:
    return import_module("._native", __name__)


@functools.cache
def _log_unknown(operation: str, what: str) -> None:
    logger.info("native %s does not know %s, the reference runs", operation, what)


def _known(operation: Operation[Any, Any], *tensors: Tensor | None, dtypes: Any = FORMATS) -> bool:
    """Whether all dtypes are among `dtypes`; where not, it is logged."""
    unknown = {str(each.dtype) for each in tensors if each is not None and each.dtype not in dtypes}
    if unknown:
        _log_unknown(operation.name, ", ".join(sorted(unknown)))
    return not unknown


@cast_scaled.implement(NAME)
def _cast_scaled(source: Tensor, out: Tensor, scale: float) -> None:
    if not _known(cast_scaled, source, out):
        return cast_scaled.reference(source, out, scale)
    require(source.shape == out.shape, f"source and out differ in shape: {tuple(source.shape)}, {tuple(out.shape)}")
    flat(source=source, out=out)
    separate(source=source, out=out)
    _library().cast_scaled(
        source.data_ptr(),
        FORMATS[source.dtype],
        out.data_ptr(),
        FORMATS[out.dtype],
        source.numel(),
        scale,
        torch.get_num_threads(),
    )


@sign_pack.implement(NAME)
def _sign_pack(grad: Tensor, residual: Tensor | None, scales: Tensor, bits: Tensor, length: int) -> None:
    if not (_known(sign_pack, grad) and _known(sign_pack, residual, dtypes=(torch.float32,))):
        return sign_pack.reference(grad, residual, scales, bits, length)
    rows, blocks = scales.shape
    require(blocks > 0 and length % blocks == 0, f"{blocks} blocks do not divide a row of {length} elements")
    block = length // blocks
    require(block % 8 == 0 and block > 0, f"a block is a multiple of 8 elements, got {block}")
    _check_signs(scales, bits, (rows,), length)
    require(rows * length >= grad.numel(), f"{rows} rows of {length} do not hold {grad.numel()} elements")
    flat(grad=grad, residual=residual)
    require(residual is None or residual.numel() == grad.numel(), "the residual is not as long as the gradient")
    separate(grad=grad, residual=residual, scales=scales)
    separate(grad=grad, residual=residual, bits=bits)
    _library().sign_pack(
        grad.data_ptr(),
        FORMATS[grad.dtype],
        address(residual),
        scales.data_ptr(),
        scales.stride(0),
        bits.data_ptr(),
        bits.stride(0),
        grad.numel(),
        rows,
        blocks,
        block,
        torch.get_num_threads(),
    )


@sign_unpack_mean.implement(NAME)
def _sign_unpack_mean(scales: Tensor, bits: Tensor, out: Tensor) -> None:
    if not _known(sign_unpack_mean, out):
        return sign_unpack_mean.reference(scales, bits, out)
    voters, rows, blocks = scales.shape
    length = bits.shape[2] * 8
    require(voters > 0 and blocks > 0 and length % blocks == 0, f"{blocks} blocks do not divide {length} elements")
    require(length // blocks % 8 == 0 and length > 0, f"a block is a multiple of 8 elements, got {length / blocks:g}")
    _check_signs(scales, bits, (voters, rows), length)
    require(rows * length >= out.numel(), f"{rows} rows of {length} do not hold {out.numel()} elements")
    flat(out=out)
    separate(scales=scales, out=out)
    separate(bits=bits, out=out)
    _library().sign_unpack_mean(
        scales.data_ptr(),
        scales.stride()[:2],
        bits.data_ptr(),
        bits.stride()[:2],
        out.data_ptr(),
        FORMATS[out.dtype],
        voters,
        out.numel(),
        blocks,
        length // blocks,
        torch.get_num_threads(),
    )


def _check_signs(scales: Tensor, bits: Tensor, leading: tuple[int, ...], length: int) -> None:
    rows_of(torch.float32, scales=scales)
    rows_of(torch.uint8, bits=bits)
    require(
        bits.shape == (*leading, length // 8),
        f"bits have the shape {tuple(bits.shape)}, scales and length ask for {(*leading, length // 8)}",
    )


@select_largest.implement(NAME)
def _select_largest(grad: Tensor, residual: Tensor | None, indices: Tensor, values: Tensor, length: int) -> None:
    known = _known(select_largest, grad, values) and _known(select_largest, residual, dtypes=(torch.float32,))
    if not known:
        return select_largest.reference(grad, residual, indices, values, length)
    require(indices.dtype in INDICES, f"indices are int32 or int64, got {indices.dtype}", TypeError)
    require(length > 0, f"a row has at least one element, got {length}")
    rows, k = values.shape
    require(indices.shape == values.shape, f"indices {tuple(indices.shape)} and values {tuple(values.shape)} differ")
    require(rows * length >= grad.numel(), f"{rows} rows of {length} do not hold {grad.numel()} elements")
    rows_of(indices.dtype, indices=indices)
    rows_of(values.dtype, values=values)
    flat(grad=grad, residual=residual)
    require(residual is None or residual.numel() == grad.numel(), "the residual is not as long as the gradient")
    separate(grad=grad, residual=residual, indices=indices)
    separate(grad=grad, residual=residual, values=values)
    _library().select_largest(
        grad.data_ptr(),
        FORMATS[grad.dtype],
        address(residual),
        indices.data_ptr(),
        indices.dtype == torch.int64,
        indices.stride(0),
        values.data_ptr(),
        FORMATS[values.dtype],
        values.stride(0),
        grad.numel(),
        length,
        rows,
        k,
        torch.get_num_threads(),
    )


@scatter_mean.implement(NAME)
def _scatter_mean(indices: Tensor, values: Tensor, out: Tensor, length: int) -> None:
    if not (_known(scatter_mean, values) and _known(scatter_mean, out, dtypes=(torch.float32,))):
        return scatter_mean.reference(indices, values, out, length)
    require(indices.dtype in INDICES, f"indices are int32 or int64, got {indices.dtype}", TypeError)
    require(indices.shape == values.shape, f"indices {tuple(indices.shape)} and values {tuple(values.shape)} differ")
    voters, rows, k = values.shape
    rows_of(indices.dtype, indices=indices)
    rows_of(values.dtype, values=values)
    flat(out=out)
    separate(indices=indices, out=out)
    separate(values=values, out=out)
    _library().scatter_mean(
        indices.data_ptr(),
        indices.dtype == torch.int64,
        indices.stride()[:2],
        values.data_ptr(),
        FORMATS[values.dtype],
        values.stride()[:2],
        out.data_ptr(),
        voters,
        rows,
        k,
        out.numel(),
        length,
        torch.get_num_threads(),
    )


@low_rank_left.implement(NAME)
def _low_rank_left(grad: Tensor, residual: Tensor | None, factors: Factors, q: Tensor, p: Tensor) -> None:
    if not _low_rank(low_rank_left, grad, residual, factors, p, q):
        low_rank_left.reference(grad, residual, factors, q, p)


@low_rank_right.implement(NAME)
def _low_rank_right(matrices: Tensor, factors: Factors, p: Tensor, q: Tensor) -> None:
    if not _low_rank(low_rank_right, matrices, None, factors, p, q):
        low_rank_right.reference(matrices, factors, p, q)


@low_rank_finish.implement(NAME)
def _low_rank_finish(grad: Tensor, residual: Tensor | None, factors: Factors, p: Tensor, q: Tensor) -> None:
    if not _low_rank(low_rank_finish, grad, residual, factors, p, q):
        low_rank_finish.reference(grad, residual, factors, p, q)


def _low_rank(
    operation: Operation[Any, Any], grad: Tensor, residual: Tensor | None, factors: Factors, p: Tensor, q: Tensor
) -> bool:
    """Run one of the three products; False where the native code does not know the dtypes or the rank."""
    if not _known(operation, grad, residual, p, q, dtypes=(torch.float32,)):
        return False
    table, rank, end = _packed(factors)
    if rank > LARGEST_RANK:
        _log_unknown(operation.name, f"ranks above {LARGEST_RANK}")
        return False
    flat(grad=grad, residual=residual, p=p, q=q)
    require(residual is None or residual.numel() == grad.numel(), "the residual is not as long as the gradient")
    require(end <= grad.numel(), f"the matrices end at element {end}, the gradient has {grad.numel()}")
    for name, factor, size in (("p", p, factors.left_offsets[-1]), ("q", q, factors.right_offsets[-1])):
        require(factor.numel() >= size, f"{name} has {factor.numel()} elements, the factors need {size}")
    separate(grad=grad, residual=residual, p=p, q=q)
    function = getattr(_library(), operation.name)
    function(
        table.data_ptr(),
        len(table),
        grad.data_ptr(),
        address(residual),
        p.data_ptr(),
        q.data_ptr(),
        torch.get_num_threads(),
    )
    return True


@functools.lru_cache(maxsize=1024)
def _packed(factors: Factors) -> tuple[Tensor, int, int]:
    """The matrices as rows of int64 for C++, the largest rank, and where the last matrix ends."""
    offsets = zip(factors.matrices, factors.left_offsets, factors.right_offsets, strict=False)
    rows = [(m.offset, m.rows, m.columns, m.rank, left, right) for m, left, right in offsets]
    for m in factors.matrices:
        require(min(m.offset, m.rows, m.columns) >= 0 and m.rank > 0, f"not a matrix: {m}")
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 6)
    end = max((m.offset + m.rows * m.columns for m in factors.matrices), default=0)
    return table, max((m.rank for m in factors.matrices), default=0), end


register_backend(NAME, "cpu", _probe)
