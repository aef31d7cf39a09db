"""What a kernel cannot see from an address, for all backends: dtypes, layout, size, device and overlap of tensors."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Sequence
from itertools import combinations, pairwise
from operator import add
from typing import Any

import torch
from torch import Tensor

from .dispatch import Operation
from .low_rank import Factors
from .residual import Residual

logger = logging.getLogger(__name__)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INDICES = (torch.int32, torch.int64)


@functools.cache
def log_unknown(backend: str, operation: str, what: str) -> None:
    """Log, once, that an operation of a backend runs on the reference, and for which tensors."""
    logger.info("%s %s does not know %s, the reference runs", backend, operation, what)


def known(
    backend: str, operation: Operation[Any, Any], *tensors: Tensor | None, dtypes: Collection[torch.dtype] = FLOATS
) -> bool:
    """Whether all dtypes are among `dtypes`; where not, it is logged."""
    unknown = {str(each.dtype) for each in tensors if each is not None and each.dtype not in dtypes}
    if unknown:
        log_unknown(backend, operation.name, ", ".join(sorted(unknown)))
    return not unknown


def require(condition: bool, message: str, error: type[Exception] = ValueError) -> None:
    """Raise `error` with `message` unless `condition` holds."""
    if not condition:
        raise error(message)


def on_one_device(**tensors: Tensor | None) -> None:
    """All are where the first is, else ValueError."""
    places = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    first, device = next(iter(places.items()))
    for name, place in places.items():
        require(place == device, f"{name} is on {place}, {first} on {device}; all tensors have to be on one device")


def flat(**tensors: Tensor | None) -> None:
    """All lie without gaps, else ValueError."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            shape, strides = tuple(tensor.shape), tensor.stride()
            raise ValueError(f"{name} is not contiguous (shape {shape}, strides {strides}); pass {name}.contiguous()")


def tensors_of(residual: Residual | None) -> tuple[Tensor, ...]:
    """The tensors of a residual, each once."""
    return tuple(named(residual).values())


def named(residual: Residual | None) -> dict[str, Tensor]:
    """The tensors of a residual by what messages call them; one name where they are the same memory."""
    if residual is None:
        return {}
    before, after = residual
    if before.dtype == after.dtype and before.is_set_to(after):
        return {"residual": after}
    return {"residual.before": before, "residual.after": after}


def rows_of(dtype: torch.dtype, **tensors: Tensor) -> None:
    """All are of `dtype` (TypeError) and their last dimensions have no gaps (ValueError)."""
    for name, tensor in tensors.items():
        require(tensor.dtype == dtype, f"{name} is of {dtype}, got {tensor.dtype}", TypeError)
        require(
            tensor.stride(-1) == 1 or tensor.shape[-1] <= 1,
            f"the rows of {name} are not contiguous (strides {tensor.stride()})",
        )


def separate(**tensors: Tensor | None) -> None:
    """No two share memory, else ValueError."""
    spans = [(name, *_span(tensor)) for name, tensor in tensors.items() if tensor is not None and tensor.numel()]
    for (first, start, end), (second, other_start, other_end) in combinations(spans, 2):
        require(end <= other_start or other_end <= start, f"{first} and {second} overlap in memory")


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte and the one past the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def check_cast(source: Tensor, out: Tensor) -> None:
    """The arguments of `cast_scaled`."""
    require(source.shape == out.shape, f"source and out differ in shape: {tuple(source.shape)}, {tuple(out.shape)}")
    on_one_device(source=source, out=out)
    flat(source=source, out=out)
    separate(source=source, out=out)


def check_gather(out: Tensor, places: Sequence[int], sizes: Sequence[int]) -> None:
    """The arguments of `gather_scaled`, whose sources have these numbers of elements."""
    flat(out=out)
    if len(sizes) != len(places):
        raise ValueError(f"there are {len(sizes)} sources and {len(places)} places")
    ends = sorted(zip(places, map(add, places, sizes), strict=True))
    apart = all(end <= start for (_, end), (start, _) in pairwise(ends))
    if sizes and not (apart and ends[0][0] >= 0 and ends[-1][1] <= out.numel()):
        spans = ", ".join(f"{place} to {place + size}" for place, size in zip(places, sizes, strict=True))
        raise ValueError(f"out has {out.numel()} elements, the sources are to lie at {spans}: inside, and apart")


def check_sign_pack(grad: Tensor, residual: Residual | None, scales: Tensor, bits: Tensor, length: int) -> None:
    """The arguments of `sign_pack`."""
    _check_blocks(scales, length)
    rows_of(torch.uint8, bits=bits)
    expected = (scales.shape[0], length // 8)
    require(bits.shape == expected, f"bits have the shape {tuple(bits.shape)}, scales and length ask for {expected}")
    _check_encoding(grad, residual, scales, bits, length, "bits")


def check_quantize_blocks(grad: Tensor, residual: Residual | None, scales: Tensor, codes: Tensor, length: int) -> None:
    """The arguments of `quantize_blocks`."""
    _check_blocks(scales, length)
    rows_of(torch.int8, codes=codes)
    expected = (scales.shape[0], length)
    require(codes.shape == expected, f"codes have the shape {tuple(codes.shape)}, scales and length ask for {expected}")
    _check_encoding(grad, residual, scales, codes, length, "codes")


def check_sign_unpack_mean(scales: Tensor, bits: Tensor, out: Tensor) -> None:
    """The arguments of `sign_unpack_mean`."""
    rows_of(torch.uint8, bits=bits)
    _check_decoding(scales, bits, bits.shape[2] * 8, out, "bits")


def check_dequantize_mean(scales: Tensor, codes: Tensor, out: Tensor) -> None:
    """The arguments of `dequantize_mean`."""
    rows_of(torch.int8, codes=codes)
    _check_decoding(scales, codes, codes.shape[2], out, "codes")


def check_select_largest(grad: Tensor, residual: Residual | None, indices: Tensor, values: Tensor, length: int) -> None:
    """The arguments of `select_largest`."""
    require(length > 0, f"a row has at least one element, got {length}")
    _check_sparse(indices, values)
    require(length - 1 <= torch.iinfo(indices.dtype).max, f"{indices.dtype} has no index of element {length - 1}")
    _holds(values.shape[0], length, grad)
    on_one_device(grad=grad, **named(residual), indices=indices, values=values)
    flat(grad=grad, **named(residual))
    _as_long(grad, residual)
    separate(grad=grad, **named(residual), indices=indices)
    separate(grad=grad, **named(residual), values=values)


def check_scatter_mean(indices: Tensor, values: Tensor, out: Tensor) -> None:
    """The arguments of `scatter_mean`."""
    _check_sparse(indices, values)
    on_one_device(indices=indices, values=values, out=out)
    flat(out=out)
    separate(indices=indices, out=out)
    separate(values=values, out=out)


def check_products(grad: Tensor, residual: Residual | None, factors: Factors, p: Tensor, q: Tensor) -> None:
    """The arguments of the three products of PowerSGD."""
    on_one_device(grad=grad, **named(residual), p=p, q=q)
    flat(grad=grad, **named(residual), p=p, q=q)
    _as_long(grad, residual)
    end = _end_apart(factors)
    require(end <= grad.numel(), f"the matrices end at element {end}, the gradient has {grad.numel()}")
    check_factor("p", p, factors.left_offsets[-1])
    check_factor("q", q, factors.right_offsets[-1])
    separate(grad=grad, **named(residual), p=p, q=q)


def check_factor(name: str, factor: Tensor, size: int) -> None:
    """A flat buffer of factors holds `size` elements."""
    flat(**{name: factor})
    require(factor.numel() >= size, f"{name} has {factor.numel()} elements, the factors need {size}")


@functools.lru_cache(maxsize=1024)
def end_of(factors: Factors) -> int:
    """One past the last element of the last matrix; ValueError for what is no matrix."""
    for m in factors.matrices:
        require(min(m.offset, m.rows, m.columns) >= 0 and m.rank > 0, f"not a matrix: {m}")
    return max((m.offset + m.rows * m.columns for m in factors.matrices), default=0)


@functools.lru_cache(maxsize=1024)
def _end_apart(factors: Factors) -> int:
    """As `end_of`; ValueError also for two matrices that share elements."""
    end = 0
    for m in sorted(factors.matrices, key=lambda each: each.offset):
        require(m.offset >= end or not m.rows * m.columns, f"the matrix before it ends at element {end}: {m}")
        end = max(end, m.offset + m.rows * m.columns)
    return end_of(factors)


def _check_blocks(scales: Tensor, length: int) -> None:
    blocks = scales.shape[-1]
    require(blocks > 0 and length % blocks == 0, f"{blocks} blocks do not divide a row of {length} elements")
    block = length // blocks
    require(block % 8 == 0 and block > 0, f"a block is a multiple of 8 elements, got {block}")
    rows_of(torch.float32, scales=scales)


def _check_encoding(
    grad: Tensor, residual: Residual | None, scales: Tensor, payload: Tensor, length: int, name: str
) -> None:
    _holds(scales.shape[0], length, grad)
    on_one_device(grad=grad, **named(residual), scales=scales, **{name: payload})
    flat(grad=grad, **named(residual))
    _as_long(grad, residual)
    separate(grad=grad, **named(residual), scales=scales)
    separate(grad=grad, **named(residual), **{name: payload})


def _check_decoding(scales: Tensor, payload: Tensor, length: int, out: Tensor, name: str) -> None:
    require(len(scales) > 0, "there are no voters")
    _check_blocks(scales, length)
    require(
        payload.shape[:2] == scales.shape[:2],
        f"{name} of {tuple(payload.shape[:2])} voters and rows, scales of {tuple(scales.shape[:2])}",
    )
    _holds(scales.shape[1], length, out)
    on_one_device(scales=scales, out=out, **{name: payload})
    flat(out=out)
    separate(scales=scales, out=out)
    separate(out=out, **{name: payload})


def _check_sparse(indices: Tensor, values: Tensor) -> None:
    require(indices.dtype in INDICES, f"indices are int32 or int64, got {indices.dtype}", TypeError)
    require(indices.shape == values.shape, f"indices {tuple(indices.shape)} and values {tuple(values.shape)} differ")
    rows_of(indices.dtype, indices=indices)
    rows_of(values.dtype, values=values)


def _holds(rows: int, length: int, tensor: Tensor) -> None:
    require(rows * length >= tensor.numel(), f"{rows} rows of {length} do not hold {tensor.numel()} elements")


def _as_long(grad: Tensor, residual: Residual | None) -> None:
    for each in tensors_of(residual):
        require(each.numel() == grad.numel(), "the residual is not as long as the gradient")
    if residual is not None:
        before, after = (each.dtype for each in residual)
        require(before == after, f"residual.before is of {before}, residual.after of {after}", TypeError)
